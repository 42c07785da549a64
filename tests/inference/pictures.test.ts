/**
 * Answers about pictures of models with multimodal rotary embeddings: the ids that transformers 5.23 generates greedily with the same
 * folders, pictures and bytes. The reference's own steps: the folder's image processor, ids with a placeholder for every four patches.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { configurationOfArguments } from "../../src/commands/arguments.ts";
import { featuresOf } from "../../src/data/microbatch.ts";
import { imagePatches } from "../../src/data/vision-language/pixels.ts";
import { greedy } from "../../src/decode/sampling.ts";
import { deal } from "../../src/inference/batch-requests.ts";
import { checkpointEntries, openModel } from "../../src/inference/checkpoint-model.ts";
import { generate } from "../../src/inference/generate.ts";
import { type ReadRequest, type Request, RequestReader } from "../../src/inference/requests.ts";
import type { Device } from "../../src/native/device.ts";
import { Images } from "../../src/native/images.ts";
import { visionModule } from "../../src/parallel/index.ts";
import { World } from "../../src/parallel/world.ts";
import { dataPlaceOf } from "../../src/train/feed/batch-source.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { png, Scratch } from "../data/fixtures.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";

const scratch = new Scratch();
let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => {
	device[Symbol.dispose]();
	scratch[Symbol.dispose]();
});

const [wide, tall, large] = (
	[
		[37, 22],
		[24, 40],
		[49, 33],
	] as const
).map(([width, height], i) => scratch.file(`${i}.png`, png(width, height, i + 1)));
const requests = [
	["Look: <image> and <image> alike?", [wide!, tall!]],
	["j4huv", []],
	["<image>", [large!]],
] as const;

test.each([
	[
		"qwen3-vl-images",
		[
			[19, 182, 268, 268, 268, 268, 268, 268, 268, 268, 268, 50, 268, 50, 268, 268],
			[65, 65, 52, 232, 28, 45, 137, 38, 114, 128, 13, 266, 45, 137, 38, 114],
			[233, 233, 233, 233, 233, 233, 233, 233, 233, 233, 233, 233, 233, 233, 233, 233],
		],
	],
	[
		"qwen3-5-images",
		[
			[7, 176, 75, 138, 270, 131, 99, 61, 51, 230, 80, 8, 25, 271, 42, 125],
			[234, 96, 45, 84, 266, 5, 120, 213, 55, 216, 103, 5, 62, 234, 268, 174],
			[56, 5, 99, 118, 22, 126, 146, 215, 240, 197, 244, 27, 138, 23, 91, 156],
		],
	],
])("%s: two pictures, text alone, one picture", async (name, expected) => {
	const flags = ["--load-hf", golden(name)];
	const { configuration: c } = configurationOfArguments(flags, {}, { trains: false, beneath: checkpointEntries });
	const world = World.alone(device);
	using run = await openModel(c, world, () => {});
	const reader = new RequestReader(c, new Images(device.library), true);
	const read = requests.map(([text, images]) => {
		const request: Request = { name: "The prompt", record: {}, kind: "text", text, images };
		return reader.read(request);
	});
	const answers = (some: readonly ReadRequest[]) => {
		const ids: (readonly number[])[] = [];
		const options = { maxNewTokens: 16, sampling: greedy, batchSize: 3 };
		generate(
			run,
			world,
			reader,
			() => some,
			options,
			(round) => ids.push(...round.map((one) => one.ids)),
		);
		return ids;
	};
	// Pixels are those of the folder's processor.
	const { task, library } = { task: reader.task, library: new Images(device.library) };
	const dealt = deal(read.slice(2), 1, dataPlaceOf(run.topology, 0), task, library).microbatch;
	const [picture] = read[2]!.images;
	const resized = (resampling: typeof task.resampling) =>
		imagePatches(library, { ...picture!, statistics: task.statistics, resampling }, task.tower.patchSize).flatMap(
			(one) => [...one],
		);
	expect([...featuresOf(dealt, visionModule).patches]).toEqual(resized("torchvision"));
	expect(resized("torchvision")).not.toEqual(resized("pillow"));
	expect(answers(read)).toEqual(expected);
	expect(read.flatMap((one) => answers([one]))).toEqual(expected);
});

test("the same on tensor-parallel ranks and in pipeline stages", () => {
	const lines = requests.map(([prompt, images]) => JSON.stringify({ prompt, images }));
	scratch.file("requests.jsonl", lines.join("\n"));
	const command = `generate ${deviceFlags} --load-hf ${golden("qwen3-vl-images")} --bytes --input requests.jsonl --max-new-tokens 8`;
	const [alone, ...others] = ["", " --llm-tp 2", " --llm-offset 1 --llm-pp 2"].map((layout) => {
		const { exitCode, stdout } = mimo(`${command}${layout}`.split(" "), scratch.path);
		expect(exitCode).toBe(0);
		return stdout;
	});
	expect(alone!.split("\n")).toHaveLength(4);
	for (const other of others) expect(other).toBe(alone!);
}, 30_000);
