/**
 * What one rank of a run with an encoder holds when encoder and language model live on different grids: its part of its
 * module, its optimizer, its end of the bridge.
 */
import type { ImageSet } from "../data/images.ts";
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridConfig } from "../models/hybrid/config.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import { type EncoderConfig, EncoderModule } from "../models/mimo/encoder.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import { AdamW, type AdamWOptions } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { BridgeDestination, type BridgeGroups, BridgeSource } from "../parallel/bridge.ts";
import { DataParallel } from "../parallel/data-parallel.ts";
import { type Group, groupOfOne } from "../parallel/group.ts";
import { type ModuleGroups, moduleGroups } from "../parallel/module-groups.ts";
import type { BucketSize } from "../parallel/parameter-set.ts";
import type { Topology } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { BridgedLanguageSchedule, EncoderSchedule } from "./bridge-schedule.ts";
import { FeaturePrefetch, type PrefetchOptions } from "./feature-prefetch.ts";
import type { Participation } from "./participation.ts";
import type { TrainingState } from "./step.ts";

export interface MimoRunOptions {
	readonly encoder: EncoderConfig;
	readonly language: HybridConfig;
	readonly imageTokenId: number;
	readonly frozen: { readonly tower: boolean; readonly projector: boolean; readonly language: boolean };
	readonly adam: AdamWOptions;
	readonly clipGrad: number;
	readonly seed: number;
	/** ZeRO-1. */
	readonly distributedOptimizer: boolean;
	/** Buckets of a module of so many replicas whose sums start during backward; null, and by default: after it, whole. */
	readonly buckets?: (module: "encoder" | "language", replicas: number) => BucketSize | null;
	/** Default: nobody asks which encoder ranks saw images, and the gradient is exact. */
	readonly participation?: Participation["policy"];
	/** A frozen tower runs ahead; absent or null: it does not. */
	readonly prefetch?: PrefetchOptions | null;
	readonly logNumZeros?: boolean;
	readonly logParametersNorm?: boolean;
}

type Shared<Batch> = Omit<TrainingState<Batch>, "schedule" | "routers" | "routerGroup" | "countsLoss" | "lossGroup">;

interface Side {
	readonly world: Group;
	readonly groups: ModuleGroups;
	/** This rank's lane of its module. */
	readonly lane: number;
	/** Draws initial weights from `seed`: the same whatever the layout. */
	initialise(seed: number): void;
	/** This rank's part of every tensor of its module. */
	logicalTensors(): Generator<LogicalTensor>;
	readonly owned: readonly Disposable[];
}

export interface EncoderSide extends Side {
	readonly module: "encoder";
	readonly encoder: EncoderModule;
	readonly state: TrainingState<ImageSet> & { readonly schedule: EncoderSchedule };
}

export interface LanguageSide extends Side {
	readonly module: "language";
	readonly model: HybridModel;
	readonly state: TrainingState<Microbatch> & { readonly schedule: BridgedLanguageSchedule };
}

/** Builds this rank's side. Every rank of the world calls it together. The receiver disposes `owned` in order. */
export async function mimoSide(
	world: World,
	topology: Topology,
	options: MimoRunOptions,
): Promise<EncoderSide | LanguageSide> {
	const everyone = await world.group(
		"world",
		Array.from({ length: topology.worldSize }, (_, rank) => rank),
	);
	const grid = topology.gridOf(world.rank);
	const inEncoder = grid === topology.encoder;
	const groups = await moduleGroups(world, grid, {
		experts: inEncoder ? 0 : options.language.moe.experts,
		sequenceParallel: !inEncoder,
	});
	const leaders = topology.leaders.includes(world.rank) ? await world.group("bridge", topology.leaders) : null;
	const bridge = { leaders, lane: groups.model.tp };
	const place = { world, topology, everyone, groups, bridge, lane: grid.coordinates(world.rank).dp };
	return inEncoder ? encoderSide(place, options) : languageSide(place, options);
}

interface Place {
	readonly world: World;
	readonly topology: Topology;
	readonly everyone: Group;
	readonly groups: ModuleGroups;
	readonly bridge: BridgeGroups;
	readonly lane: number;
}

const trainsEncoder = ({ frozen }: MimoRunOptions) => !frozen.tower || !frozen.projector;

function encoderSide({ world, topology, everyone, groups, bridge, lane }: Place, options: MimoRunOptions): EncoderSide {
	const { device } = world;
	const buckets = options.buckets?.("encoder", groups.replicas.dense.size) ?? null;
	const encoder = new EncoderModule(device, options.encoder, {
		...(buckets && { buckets }),
		frozenTower: options.frozen.tower,
		frozenProjector: options.frozen.projector,
		parallel: groups.model,
		replicas: replicasOf(groups),
	});
	const source = new BridgeSource(device, topology, world.rank, bridge, encoder.width, options.encoder.tower.dtype);
	const shared = sharedState<ImageSet>(encoder.parameters, everyone, groups, options, buckets !== null);
	const participation = options.participation && {
		policy: options.participation,
		ranks: topology.encoder!.lanes,
		replica: shared.replicas[0]!,
		votes: groups.model.tp.rank === 0,
	};
	const prefetch = options.prefetch ? new FeaturePrefetch(encoder, options.prefetch) : null;
	return {
		module: "encoder",
		world: everyone,
		groups,
		lane,
		encoder,
		initialise: (seed) => encoder.initialise(seed),
		logicalTensors: () => encoder.logicalTensors(),
		owned: [...(prefetch ? [prefetch] : []), shared.optimizer, shared.scalars, encoder],
		state: {
			...shared,
			routers: [],
			routerGroup: groupOfOne("no routers", world.rank),
			countsLoss: false,
			schedule: new EncoderSchedule(encoder, source, trainsEncoder(options), prefetch),
			...(participation ? { participation } : {}),
		},
	};
}

function languageSide(
	{ world, topology, everyone, groups, bridge, lane }: Place,
	options: MimoRunOptions,
): LanguageSide {
	const { device } = world;
	const buckets = options.buckets?.("language", groups.replicas.dense.size) ?? null;
	const model = new HybridModel(device, options.language, {
		...(buckets && { buckets }),
		frozen: options.frozen.language,
		parallel: groups.model,
		replicas: replicasOf(groups),
	});
	const { hiddenSize } = options.language;
	const dtype = options.encoder.tower.dtype;
	const destination = new BridgeDestination(device, topology, world.rank, bridge, hiddenSize, dtype);
	const shared = sharedState<Microbatch>(model.parameters, everyone, groups, options, buckets !== null);
	const participation = options.participation && {
		policy: options.participation,
		ranks: topology.encoder!.lanes,
		replica: null,
		votes: false,
	};
	return {
		module: "language",
		world: everyone,
		groups,
		lane,
		model,
		initialise: (seed) => model.initialise(seed),
		logicalTensors: () => model.logicalTensors(),
		owned: [shared.optimizer, shared.scalars, model],
		state: {
			...shared,
			routers: [...model.routers.values()],
			routerGroup: groups.tpDp,
			lossGroup: groups.tpDp,
			countsLoss: groups.model.tp.rank === 0,
			schedule: new BridgedLanguageSchedule(model, destination, options.imageTokenId, trainsEncoder(options)),
			...(participation ? { participation } : {}),
		},
	};
}

function replicasOf({ replicas }: ModuleGroups) {
	return { dense: replicas.dense.size, expert: replicas.expert.size };
}

function sharedState<Batch>(
	parameters: HybridModel["parameters"],
	world: Group,
	groups: ModuleGroups,
	options: MimoRunOptions,
	overlaps: boolean,
): Shared<Batch> {
	const countsReplicated = groups.model.tp.rank === 0;
	const { distributedOptimizer } = options;
	const replica = new DataParallel(parameters, groups.replicas, distributedOptimizer, countsReplicated, overlaps);
	replica.connect();
	const scalars = new StepScalars(parameters.device);
	const { clipGrad, seed } = options;
	const { logNumZeros = false, logParametersNorm = false } = options;
	return {
		replicas: [replica],
		world,
		scalars,
		optimizer: new AdamW([replica], scalars, options.adam),
		clipGrad,
		seed,
		logNumZeros,
		logParametersNorm,
	};
}
