/** The teacher's weights, from a checkpoint of any format (docs/spec/elastic.md §11). */
import { loadModel, openSource, requireFormat } from "../../checkpoint/index.ts";
import { requireSameModel } from "../../config/same-model.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { Run } from "../assemble.ts";

/**
 * Reads this rank's part of the teacher's weights; nothing where there is no teacher. A router in the checkpoint is left out:
 * the teacher is the parent at full size. Throws a UserError for a checkpoint of another model.
 */
export async function loadTeacher(c: TrainingConfiguration, { teacher }: Pick<Run, "teacher">): Promise<void> {
	const path = c.exportKdTeacherLoad;
	if (path === null || teacher === null) return;
	using source = openSource(path, requireFormat(path, null), {
		...{ optimizer: false, allowFallback: c.allowFallback, visionHeads: null, inert: [] },
		pattern: c.hybridLayerPattern,
		newLayers: { seed: c.seed, sizes: {} },
	});
	requireSameModel(path, { ...source.model, flextron: false }, { ...c });
	await source.prepare?.();
	loadModel(teacher, source.weights, true);
}
