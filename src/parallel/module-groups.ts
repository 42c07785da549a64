/** The process groups of one module that a rank is in (docs/spec/runtime.md §1.2). */
import type { ReplicaGroups } from "./data-parallel.ts";
import { chooseDispatcher, type DispatcherChoice, isChoice } from "./experts/choose-dispatcher.ts";
import type { Dispatcher, ExpertCapacity, ExpertNodes, ExpertParallel } from "./experts/members.ts";
import { type Grid, type GroupKind, groupWith, kindsOf } from "./grid.ts";
import { type Group, groupOfOne } from "./group.ts";
import type { ShardPlace } from "./shard.ts";

/** Creates groups, as World does. All members create their groups in one order. */
export interface GroupFactory {
	readonly rank: number;
	group(name: string, ranks: readonly number[]): Promise<Group>;
}

export interface ModuleGroups {
	readonly model: ModelParallel;
	readonly replicas: ReplicaGroups;
	/** Ranks over which a router is replicated: tensor- and context-parallel ranks and data-parallel replicas. */
	readonly tpDp: Group;
	/** The pipeline stages, one rank of each. */
	readonly stages: Group;
	/** Ranks that take the same microbatches: tensor- and context-parallel ranks of all stages. */
	readonly lane: Group;
	/** Every rank of the module. */
	readonly module: Group;
}

/**
 * Creates this rank's groups of its module. `experts`: number of routed experts of the language model, 0 for the encoder.
 * `sequenceParallel`: tensor-parallel ranks hold different tokens between layers. `copies`: the first and the last stage hold
 * copies of one parameter. `expertCapacity`: default unbounded. `dispatcher`: the dispatcher or what to choose it by; default alltoall.
 */
export async function moduleGroups(
	factory: GroupFactory,
	grid: Grid,
	options: {
		readonly experts: number;
		readonly sequenceParallel: boolean;
		readonly copies?: boolean;
		readonly expertCapacity?: ExpertCapacity;
		readonly dispatcher?: Dispatcher | DispatcherChoice;
	},
): Promise<ModuleGroups> {
	const made: Partial<Record<GroupKind, Group>> = {};
	for (const kind of kindsOf(grid)) {
		made[kind] = await factory.group(`${grid.name}.${kind}`, groupWith(grid, kind, factory.rank));
	}
	const {
		tp,
		cp = groupOfOne(`${grid.name}.cp`, factory.rank),
		tp_cp: tokens = tp,
		dp: dense,
		tp_dp: tpDp,
		expt_dp: expert,
		tp_ep: dispatch,
	} = made as Record<GroupKind, Group>;
	const matrices = { dense: tpDp, expert: made.expt_tp_dp ?? expert };
	const stages = made.pp ?? groupOfOne(`${grid.name}.pp`, factory.rank);
	const { dispatcher: wanted = "alltoall" } = options;
	const ranks = { ranks: dispatch.ranks, expertTensor: grid.shape.expertTensor };
	const dispatcher = isChoice(wanted) ? chooseDispatcher(ranks, wanted) : wanted;
	const experts: ExpertParallel | null =
		options.experts > 0 && dispatch.size > 1
			? {
					group: dispatch,
					expertTensor: grid.shape.expertTensor,
					localExperts: options.experts / grid.shape.expert,
					capacity: options.expertCapacity ?? { bound: null, mostTokens: null },
					dispatcher:
						typeof dispatcher === "string"
							? dispatcher
							: ((await expertNodes(factory, dispatch, dispatcher.ranksPerNode)) ?? "alltoall"),
				}
			: null;
	// Creates the communicators now rather than inside a layer.
	for (const group of experts ? exchanging(experts) : []) if (group.size > 1) group.rowTransport();
	const ends = [stages.ranks[0]!, stages.ranks.at(-1)!];
	const copied = options.copies === true && stages.size > 1 && ends.includes(factory.rank);
	return {
		model: { tp, cp, tokens, experts },
		replicas: {
			dense,
			expert,
			matrices,
			sequenceParallel: options.sequenceParallel && tp.size > 1 ? tp : null,
			copies: copied ? await factory.group(`${grid.name}.embd`, ends) : null,
		},
		tpDp,
		stages,
		lane: made.mp ?? tokens,
		module: made.module ?? tpDp,
	};
}

/** The groups over which the dispatcher exchanges rows. */
function exchanging({ group, dispatcher }: ExpertParallel): Group[] {
	if (dispatcher === "alltoall") return [group];
	return dispatcher === "allgather" ? [] : [dispatcher.between, dispatcher.within];
}

/** Splits a dispatch group into nodes; null if it is within one node. Throws a RangeError if nodes hold unequal parts of it. */
async function expertNodes(
	factory: GroupFactory,
	{ name, ranks }: Group,
	ranksPerNode: number,
): Promise<ExpertNodes | null> {
	const nodes = [...Map.groupBy(ranks, (rank) => Math.floor(rank / ranksPerNode)).values()];
	if (nodes.length === 1) return null;
	if (nodes.some((members) => members.length !== nodes[0]!.length)) {
		throw new RangeError(`${name}: ranks ${ranks} are unequal parts of nodes of ${ranksPerNode}.`);
	}
	const own = nodes.find((members) => members.includes(factory.rank))!;
	const place = own.indexOf(factory.rank);
	const within = await factory.group(`${name}.within_node`, own);
	const between = nodes.map((members) => members[place]!);
	return { within, between: await factory.group(`${name}.between_nodes`, between) };
}

// The groups inside one replica of a module, over which its layers communicate.

export interface ModelParallel {
	/** Tensor-parallel ranks; with sequence parallelism each holds its own run of tokens between the language model's layers. */
	readonly tp: Group;
	/** Context-parallel ranks: each holds a run of a microbatch's tokens, within layers too. */
	readonly cp: Group;
	/** The ranks among which a microbatch's tokens are cut between layers: those of tp of every rank of cp. */
	readonly tokens: Group;
	/** null: this rank holds every expert whole. */
	readonly experts: ExpertParallel | null;
}

/** The whole module on one rank. */
export function noModelParallel(module: string, rank: number): ModelParallel {
	const tp = groupOfOne(`${module}.tp`, rank);
	return { tp, cp: groupOfOne(`${module}.cp`, rank), tokens: tp, experts: null };
}

/** This rank's position among the shards of dense parameters, of an expert, and of the set of experts. */
export function placeOf({ tp, experts }: ModelParallel): {
	readonly tensor: ShardPlace;
	readonly expertTensor: ShardPlace;
	readonly expert: ShardPlace;
} {
	const tensor = { rank: tp.rank, size: tp.size };
	if (experts === null) return { tensor, expertTensor: { rank: 0, size: 1 }, expert: { rank: 0, size: 1 } };
	const { group, expertTensor } = experts;
	return {
		tensor,
		expertTensor: { rank: group.rank % expertTensor, size: expertTensor },
		expert: { rank: Math.floor(group.rank / expertTensor), size: group.size / expertTensor },
	};
}
