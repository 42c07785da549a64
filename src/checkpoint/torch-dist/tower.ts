/** The vision tower of a torch_dist checkpoint, alone or in a model, as a training starts from it (docs/spec/checkpoint.md §3). */
import { UserError } from "../../system/errors.ts";
import type { FolderParts } from "../hf/parts.ts";
import { radioOptions, towerOfLogical } from "../hf/vision-configuration.ts";
import { publishedTower, towerPrefix } from "../hf/vision-names.ts";
import { MappedStore, planTensors } from "../mapping.ts";
import { selectTensors } from "../store.ts";
import { unflatten } from "./common.ts";
import { TorchDistFolder } from "./folder.ts";
import { bufferKey, readKeys } from "./keys.ts";

const videoEmbedder = `${towerPrefix}video_embedder.weight`;

/**
 * The tower as that of a folder whose config.json says nothing: what its tensors do not say is RADIO's. `visionHeads`: its heads, where
 * its width does not tell. Throws a UserError where there is no tower.
 */
export function openMegatronTower(path: string, { visionHeads }: { readonly visionHeads: number | null }): FolderParts {
	const folder = TorchDistFolder.open(path);
	try {
		const whole = unflatten(folder, folder.catalog.flattened);
		const stored = selectTensors(whole, (key) => !bufferKey.test(key));
		const { correspondence } = readKeys(stored.tensors, folder.path);
		const all = new MappedStore(stored, planTensors(stored, correspondence, "logical"));
		const weights = selectTensors(all, (name) => name.startsWith(towerPrefix) && name !== videoEmbedder);
		const sizes = towerOfLogical(weights, { visionNumAttentionHeads: visionHeads }, folder.path);
		if (sizes === null) throw new UserError(`${path} (--load-vision) holds no vision tower.`);
		const side = Math.round(Math.sqrt(sizes.positions)) * sizes.patchDim;
		const { visionPatchBias = false, visionClassTokenPositions = false, visionFinalLayernorm = false } = sizes;
		const configuration = {
			...{ ...sizes, ...radioOptions, visionPatchBias, visionClassTokenPositions, visionFinalLayernorm },
			...{
				visionKvChannels: sizes.visionHiddenSize / sizes.visionNumAttentionHeads,
				visionActivation: "gelu" as const,
			},
			...{ visionMaxImgH: side, visionMaxImgW: side },
		};
		const left = all.tensors.has(videoEmbedder)
			? [`${folder.path}: ${videoEmbedder} is left out: it embeds frames of videos, which are not trained on.`]
			: [];
		return {
			...{ path: folder.path, configPath: folder.path, configText: null, json: {} },
			...{ language: null, tower: { configuration, spelling: publishedTower }, projector: null, imageTokenId: null },
			...{ weights, stored: weights, leftOut: [], scales: [], notices: folder.notice === null ? [] : [folder.notice] },
			warnings: left,
			[Symbol.dispose]: () => folder[Symbol.dispose](),
		};
	} catch (error) {
		folder[Symbol.dispose]();
		throw error;
	}
}
