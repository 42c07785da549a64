/** What mimo computes of a text or of pictures and a question, beside text_adapters.py and picture_logits.py of transformers. */
import { configurationOfArguments } from "../../src/commands/arguments.ts";
import { deal } from "../../src/inference/batch-requests.ts";
import { checkpointEntries, openModel } from "../../src/inference/checkpoint-model.ts";
import { RequestReader } from "../../src/inference/requests.ts";
import { Images } from "../../src/native/images.ts";
import { World } from "../../src/parallel/world.ts";
import { evaluate } from "../../src/train/evaluate.ts";
import { dataPlaceOf } from "../../src/train/feed/batch-source.ts";
import { testDevice } from "../support.ts";

/** Ids of a text, or of a question about pictures, and the logits of all its tokens, by a model that the flags name. */
export async function logitsOf(
	flags: readonly string[],
	images: readonly string[],
	text: string,
	kind: "text" | "conversation" = "conversation",
) {
	using device = await testDevice();
	const { configuration: c } = configurationOfArguments(flags, {}, { trains: false, beneath: checkpointEntries });
	const world = World.alone(device);
	using run = await openModel(c, world, () => {});
	const decoder = new Images(device.library);
	const reader = new RequestReader(c, decoder, false);
	const prompt = reader.read({ name: "It", record: {}, kind, text, images });
	const { microbatch } = deal([prompt], 1, dataPlaceOf(run.topology, 0), reader.task, decoder);
	const logits: number[] = [];
	evaluate(run.state, [microbatch], (name, value) => {
		if (name !== "logits") return;
		const padded = value.toFloat32();
		for (let row = 0; row < padded.length; row += value.width) {
			logits.push(...padded.subarray(row, row + c.vocabSize));
		}
	});
	return { ids: [...prompt.ids], logits: Float32Array.from(logits) };
}
