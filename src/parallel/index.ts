/** The part of this folder that others use; they import nothing else of it, but for modules that are loaded when they are asked for. */
export {
	type ColumnRange,
	columnsForTokens,
	type Dealt,
	tokensForColumns,
	withRowsBefore,
} from "./context-parallel.ts";
export { DataParallel } from "./data-parallel.ts";
export {
	describeTopology,
	type ModuleDescription,
	type NamedGroups,
	type TopologyDescription,
} from "./describe-topology.ts";
export { type Companion, Edge, type EdgeOptions, type Rows } from "./edge.ts";
export { type EdgeLayout, ranksOf } from "./edge-layout.ts";
export { type Gathering, startGather, startSum } from "./experts/all-gather.ts";
export { Exchange, startCombine, startDispatch } from "./experts/all-to-all.ts";
export { type DispatcherChoice, describeChoice, isChoice } from "./experts/choose-dispatcher.ts";
export type { ExpertCapacity } from "./experts/members.ts";
export {
	type Dispatcher,
	type ExchangeMembers,
	type ExpertNodes,
	type ExpertParallel,
	tokensOfAnyMember,
} from "./experts/members.ts";
export type { StartedExchange } from "./experts/recorded-exchange.ts";
export type { Grid } from "./grid.ts";
export {
	consecutive,
	type DeviceRanges,
	exchangeTexts,
	type Group,
	groupOfOne,
	type Pending,
	type Reduction,
	type RowRanges,
	type RowStage,
	type RowsOfMember,
} from "./group.ts";
export { type Layout, languageAlone, layoutFor, type NamedTopology, namedTopology, parseLayout } from "./layout.ts";
export { type ModelParallel, type ModuleGroups, moduleGroups, noModelParallel, placeOf } from "./module-groups.ts";
export {
	type BucketSize,
	type BufferEntry,
	type MatrixLayout,
	type ParameterBuffer,
	type ParameterRequest,
	ParameterSet,
} from "./parameter-set.ts";
export { RunGroup } from "./run-group.ts";
export { localShape, type Shard, type ShardBlock, type ShardPlace, shardBlocks } from "./shard.ts";
export {
	columnParallelLinear,
	copyToTensorParallel,
	gatherColumns,
	gatherSequence,
	gatherStatistics,
	reduceFromTensorParallel,
	reduceScatterSequence,
	rowParallelLinear,
	scatterColumns,
	scatterSequence,
} from "./tensor-parallel.ts";
export { type FeatureEdge, languageModule, type Topology, topologyOf, visionModule } from "./topology.ts";
export { World } from "./world.ts";
