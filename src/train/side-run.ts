/** A run in which encoder and language model live on different ranks, as one of those ranks sees it. */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageSet } from "../data/images.ts";
import type { Microbatch } from "../data/microbatch.ts";
import { hybridConfig } from "../models/hybrid/from-configuration.ts";
import { encoderConfig } from "../models/mimo/from-configuration.ts";
import type { Topology } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { gradientBuckets } from "./gradient-buckets.ts";
import { mimoSide } from "./mimo-run.ts";
import type { TrainingRun } from "./training-run.ts";

/** Every rank of the world calls this together. */
export async function sideRun(
	c: TrainingConfiguration,
	topology: Topology,
	world: World,
): Promise<TrainingRun<ImageSet> | TrainingRun<Microbatch>> {
	const side = await mimoSide(world, topology, {
		encoder: encoderConfig(c),
		language: hybridConfig(c),
		imageTokenId: c.imageTokenId,
		frozen: { tower: c.freezeVit, projector: c.freezeProjection, language: c.freezeLm },
		adam: { beta1: c.adamBeta1, beta2: c.adamBeta2, epsilon: c.adamEps },
		clipGrad: c.clipGrad,
		seed: c.seed,
		distributedOptimizer: c.useDistributedOptimizer,
		buckets: (module, replicas) => gradientBuckets(c, module, replicas),
		participation: c.encoderGradParticipation,
		prefetch: c.mimoEncoderPrefetch ? { depth: c.mimoEncoderPrefetchDepth, debug: debugOf(c, world.rank) } : null,
		logNumZeros: c.logNumZerosInGrad,
		logParametersNorm: c.logParamsNorm,
	});
	const shared = {
		topology,
		rank: world.rank,
		groups: side.groups,
		initialise: (seed: number) => side.initialise(seed),
		logicalTensors: () => side.logicalTensors(),
		[Symbol.dispose]() {
			for (const owned of side.owned) owned[Symbol.dispose]();
		},
	};
	return side.module === "encoder"
		? { ...shared, state: side.state, encoder: side.encoder, language: null, batchOf: ({ images }) => images }
		: { ...shared, state: side.state, encoder: null, language: side.model, batchOf: ({ text }) => text };
}

/** Lines of --mimo-encoder-prefetch-debug. */
function debugOf(c: TrainingConfiguration, rank: number): ((line: string) => void) | null {
	if (!c.mimoEncoderPrefetchDebug) return null;
	return (line) => process.stdout.write(`encoder prefetch rank=${rank} ${line}\n`);
}
