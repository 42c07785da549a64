/** The communication groups of one module as one of its ranks sees them (spec runtime 1.2). */
import type { ReplicaGroups } from "./data-parallel.ts";
import type { ExpertParallel } from "./expert-parallel.ts";
import { type Grid, type GroupKind, groupKinds, groupWith } from "./grid.ts";
import type { Group } from "./group.ts";
import type { ModelParallel } from "./model-parallel.ts";

/** Creates groups: a World does. Members call it in equal order. */
export interface GroupFactory {
	readonly rank: number;
	group(name: string, ranks: readonly number[]): Promise<Group>;
}

export interface ModuleGroups {
	readonly model: ModelParallel;
	readonly replicas: ReplicaGroups;
	/** Ranks with the same routers: they share tokens or replicate each other. */
	readonly tpDp: Group;
}

/**
 * Makes this rank's groups of its module. `experts`: routed experts of the language model, 0 for the encoder.
 * `sequenceParallel`: tensor-parallel ranks hold different tokens between layers.
 */
export async function moduleGroups(
	factory: GroupFactory,
	grid: Grid,
	options: { readonly experts: number; readonly sequenceParallel: boolean },
): Promise<ModuleGroups> {
	const groups = {} as Record<GroupKind, Group>;
	for (const kind of Object.keys(groupKinds) as GroupKind[]) {
		groups[kind] = await factory.group(`${grid.name}.${kind}`, groupWith(grid, kind, factory.rank));
	}
	const { tp, dp: dense, tp_dp: tpDp, expt_dp: expert, tp_ep: dispatch } = groups;
	const experts: ExpertParallel | null =
		options.experts > 0 && dispatch.size > 1
			? {
					group: dispatch,
					expertTensor: grid.shape.expertTensor,
					localExperts: options.experts / grid.shape.expert,
				}
			: null;
	return {
		model: { tp, experts },
		replicas: { dense, expert, sequenceParallel: options.sequenceParallel && tp.size > 1 ? tp : null },
		tpDp,
	};
}
