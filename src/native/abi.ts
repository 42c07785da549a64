/**
 * Generated from cuda/include/mimo.h by cuda/include/tables.ts ("bun build.ts tables"); do not edit. Every constant, enumeration,
 * struct and function of the ABI in C names: each header of cuda/include/mimo has its module in abi/, and says what the names
 * mean. Wrappers live in device.ts.
 */
import * as algorithms from "./abi/algorithms.ts";
import * as collectives from "./abi/collectives.ts";
import * as device from "./abi/device.ts";
import * as digests from "./abi/digests.ts";
import * as exchangeRows from "./abi/exchange-rows.ts";
import * as hosts from "./abi/hosts.ts";
import * as images from "./abi/images.ts";
import * as interrupts from "./abi/interrupts.ts";
import * as library from "./abi/library.ts";
import * as memory from "./abi/memory.ts";
import * as activation from "./abi/ops/activation.ts";
import * as attention from "./abi/ops/attention.ts";
import * as e4m3 from "./abi/ops/e4m3.ts";
import * as elasticMasks from "./abi/ops/elastic-masks.ts";
import * as elementwise from "./abi/ops/elementwise.ts";
import * as embedding from "./abi/ops/embedding.ts";
import * as gemm from "./abi/ops/gemm.ts";
import * as groupedGemm from "./abi/ops/grouped-gemm.ts";
import * as groupedMlp from "./abi/ops/grouped-mlp.ts";
import * as loss from "./abi/ops/loss.ts";
import * as mamba from "./abi/ops/mamba.ts";
import * as moeDispatch from "./abi/ops/moe-dispatch.ts";
import * as norms from "./abi/ops/norms.ts";
import * as optimizer from "./abi/ops/optimizer.ts";
import * as philox from "./abi/ops/philox.ts";
import * as reductions from "./abi/ops/reductions.ts";
import * as rope from "./abi/ops/rope.ts";
import * as router from "./abi/ops/router.ts";
import * as spmm from "./abi/ops/spmm.ts";
import * as run from "./abi/run.ts";
import * as stream from "./abi/stream.ts";
import type { Fields, ScalarType } from "./structs.ts";

export { Backend, type BackendName, Reduction, type ReductionName } from "./abi/collectives.ts";
export { RowStage, type RowStageName, RowTransport, type RowTransportName } from "./abi/exchange-rows.ts";
export { HOST_FAN_OUT } from "./abi/hosts.ts";
export { ImageDecoding, type ImageDecodingName } from "./abi/images.ts";
export { INTERRUPT_SENTENCE_BYTES } from "./abi/interrupts.ts";
export { ABI_VERSION, Dtype, type DtypeName, Status, type StatusName } from "./abi/library.ts";
export { MemoryTag, type MemoryTagName } from "./abi/memory.ts";
export { Activation, type ActivationName } from "./abi/ops/activation.ts";
export { AttentionMask, type AttentionMaskName } from "./abi/ops/attention.ts";
export { E4M3_SPARE_FACTORS, MlpRecipe, type MlpRecipeName } from "./abi/ops/e4m3.ts";
export { Distribution, type DistributionName } from "./abi/ops/philox.ts";
export { ScoreFunction, type ScoreFunctionName } from "./abi/ops/router.ts";
export {
	CallState,
	type CallStateName,
	COORDINATES_BYTES,
	Collective,
	type CollectiveName,
	HOST_BYTES,
	MODULE_BYTES,
	RankPhase,
	type RankPhaseName,
	RUN_PATH_BYTES,
	SENTENCE_BYTES,
} from "./abi/run.ts";

/** Structs the library fills in. */
export const structs = {
	...device.structs,
	...stream.structs,
	...memory.structs,
	...run.structs,
	...exchangeRows.structs,
} as const satisfies Record<string, Fields>;

/** Argument structs: operation NAME is `int32_t mimo_NAME(mimo_stream*, const mimo_NAME_args*)`. */
export const operations = {
	...gemm.operations,
	...spmm.operations,
	...norms.operations,
	...activation.operations,
	...attention.operations,
	...rope.operations,
	...mamba.operations,
	...router.operations,
	...moeDispatch.operations,
	...e4m3.operations,
	...groupedGemm.operations,
	...groupedMlp.operations,
	...elasticMasks.operations,
	...embedding.operations,
	...loss.operations,
	...elementwise.operations,
	...reductions.operations,
	...philox.operations,
	...optimizer.operations,
} as const satisfies Record<string, Record<string, ScalarType>>;
export type OperationName = keyof typeof operations;

/** Functions that are not operations: C argument types in order, and what they return. */
export const functions = {
	...library.functions,
	...device.functions,
	...stream.functions,
	...algorithms.functions,
	...memory.functions,
	...run.functions,
	...hosts.functions,
	...collectives.functions,
	...exchangeRows.functions,
	...interrupts.functions,
	...digests.functions,
	...images.functions,
} as const;
