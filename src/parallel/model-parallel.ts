/** The groups inside one replica of a module, over which its layers communicate. */
import type { ExpertParallel } from "./experts/members.ts";
import { type Group, groupOfOne } from "./group.ts";
import type { ShardPlace } from "./shard.ts";

export interface ModelParallel {
	/** Ranks that cut dense layers; between the language model's layers each holds its own run of tokens. */
	readonly tp: Group;
	/** null: every expert is here whole. */
	readonly experts: ExpertParallel | null;
}

/** One process holds the module. */
export function noModelParallel(module: string, rank: number): ModelParallel {
	return { tp: groupOfOne(`${module}.tp`, rank), experts: null };
}

/** This rank's part of dense parameters, of an expert, and of the set of experts. */
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
