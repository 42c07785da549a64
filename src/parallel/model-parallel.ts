/** The groups inside one replica of a module, over which its layers communicate. */
import type { ExpertParallel } from "./experts/members.ts";
import { type Group, groupOfOne } from "./group.ts";
import type { ShardPlace } from "./shard.ts";

export interface ModelParallel {
	/** Tensor-parallel ranks; with sequence parallelism each holds its own run of tokens between the language model's layers. */
	readonly tp: Group;
	/** null: this rank holds every expert whole. */
	readonly experts: ExpertParallel | null;
}

/** The whole module on one rank. */
export function noModelParallel(module: string, rank: number): ModelParallel {
	return { tp: groupOfOne(`${module}.tp`, rank), experts: null };
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
