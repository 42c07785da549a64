/**
 * Samples for `mimo verify --samples data`: the first global batch of the configured data, as one lane reads it.
 * Shorter samples are padded to seq-length, so that every layout can cut them: the padding has no part in the loss, and
 * earlier tokens do not see it.
 */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { placeImages } from "../../data/images.ts";
import type { Microbatch } from "../../data/microbatch.ts";
import { oneRank } from "../../data/routing/from-configuration.ts";
import { wholeShare } from "../../data/routing/image-share.ts";
import { groupOfOne, visionModule } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { ownLane } from "../../train/feed/shared-batches.ts";
import { openSources } from "../../train/feed/sources.ts";
import type { Sample } from "./samples.ts";

/** Every process of a comparison reads them anew and gets the same. Throws UserErrors about the data. */
export async function readSamples(c: TrainingConfiguration): Promise<Sample[]> {
	// One sample a microbatch; no data are held out, and no file is written.
	const alone = { ...c, microBatchSize: 1, evalIters: 0, evalCaptions: 0, dataSkippedFile: null, save: null };
	const { training } = await openSources(
		alone,
		{ ...oneRank, features: { [visionModule]: { lanes: [0], share: wholeShare } } },
		{
			world: groupOfOne("verify.data", 0),
			lane: ownLane,
			states: null,
			consumedValidSamples: 0,
		},
	);
	try {
		const microbatches = await training.step(1);
		return microbatches.map((batch, index) => {
			const { text } = batch;
			if (text.ids.length > c.seqLength) {
				throw new UserError(
					`Sample ${index} of the data has ${counted(text.ids.length, "token")}; seq-length is ${c.seqLength}.`,
				);
			}
			const features = Object.entries(batch.features).map(
				([module, set]) => [module, placeImages(set, index)] as const,
			);
			return { text: padded(text, c.seqLength), features: Object.fromEntries(features) };
		});
	} finally {
		await training.close?.();
	}
}

const ignored = -100;

/** The last sequence grows. */
function padded({ ids, labels, lossMask, lengths }: Microbatch, tokens: number): Microbatch {
	const all = {
		ids: new Int32Array(tokens),
		labels: new Int32Array(tokens).fill(ignored),
		lossMask: new Float32Array(tokens),
	};
	all.ids.set(ids);
	all.labels.set(labels);
	all.lossMask.set(lossMask);
	return { ...all, lengths: [...lengths.slice(0, -1), lengths.at(-1)! + tokens - ids.length] };
}
