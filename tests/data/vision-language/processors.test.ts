/** Pictures of odd sizes as transformers' processors of SigLIP, InternVL, Qwen-VL and LLaVA-OneVision make them: sizes, tiles and every value. */
import { beforeAll, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { blockSize, type ImageSizing, patchGrids, planImages } from "../../../src/data/vision-language/image-plan.ts";
import { encodePng, imagePatches } from "../../../src/data/vision-language/pixels.ts";
import { type ChannelStatistics, clipStatistics, Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { mergedOrder } from "../../../src/parity/pictures/batches.ts";

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

interface Case {
	readonly height: number;
	readonly width: number;
	readonly siglip: string;
	readonly tiles: readonly [count: number, digest: string];
	/** Of the image alone, and of a sample with two. */
	readonly anyres: readonly [count: number, alone: string, one: string];
	readonly blocks: readonly [rows: number, columns: number, digest: string];
}
const { cases } = JSON.parse(readFileSync(join(import.meta.dir, "../../golden/processors.json"), "utf8")) as {
	cases: readonly Case[];
};

/** Bytes of a picture: tests/golden/tools/make_processors.py. */
function picture(number: number, { height, width }: Case): Uint8Array {
	return Uint8Array.from({ length: height * width * 3 }, (_, n) => {
		let h = (Math.imul(n, 0x9e3779b1) + Math.imul(number, 0x85ebca77)) >>> 0;
		h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
		h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
		return ((h ^ (h >>> 16)) >>> 24) & 0xff;
	});
}

const digest = (...parts: readonly Float32Array[]) => {
	const hash = createHash("sha256");
	for (const part of parts) hash.update(new Uint8Array(part.buffer, part.byteOffset, part.byteLength));
	return hash.digest("hex").slice(0, 16);
};

const half: ChannelStatistics = { mean: [0.5, 0.5, 0.5], deviation: [0.5, 0.5, 0.5] };
const imageNet: ChannelStatistics = { mean: [0.485, 0.456, 0.406], deviation: [0.229, 0.224, 0.225] };
const side = 28;
/** A tile is one patch here, so that values come plane by plane. */
const planes = { patchSize: side, pixelShuffle: false, dropClassTokens: true, classTokens: 0 };
const tiling: ImageSizing = {
	...{ mode: "tiles", tileSize: side, minTiles: 1, maxTiles: 6 },
	...{ areaWeighted: false, thumbnail: true, tags: false },
};

const anyres: ImageSizing = {
	...{ mode: "anyres", tileSize: side, maxTiles: 9 },
	pinpoints: [1, 2, 3, 4].flatMap((rows) =>
		[1, 2, 3, 4].map((columns) => ({ height: side * rows, width: side * columns })),
	),
};

test.each(cases.map((one, number) => [`${one.width} x ${one.height}`, number, one] as const))(
	"%s",
	(_, number, one) => {
		const { width, height } = one;
		const file = encodePng({ width, height, channels: 3, pixels: picture(number, one) });
		const made = (sizing: ImageSizing, tower: typeof planes, statistics: ChannelStatistics, count = 1) => {
			const [plan] = planImages(new Array(count).fill({ width, height }), 1_000_000, sizing, tower);
			const common = { file, decoding: "transformers", statistics, resampling: "torchvision" } as const;
			return { plan: plan!, patches: imagePatches(images, { ...common, plan: plan! }, tower.patchSize) };
		};
		const fixed = made({ mode: "fixed", width: side, height: side }, planes, half);
		expect(digest(...fixed.patches)).toBe(one.siglip);
		const tiles = made(tiling, planes, imageNet);
		expect([tiles.patches.length, digest(...tiles.patches)]).toEqual([...one.tiles]);
		const alone = made(anyres, planes, clipStatistics);
		const ofTwo = made(anyres, planes, clipStatistics, 2);
		expect([alone.patches.length, digest(...alone.patches), digest(...ofTwo.patches)]).toEqual([...one.anyres]);
		const tower = { ...planes, patchSize: 4, pixelShuffle: true };
		const blocks = made({ mode: "blocks", minPixels: 256, maxPixels: 6144 }, tower, half);
		const [grid] = patchGrids(blocks.plan, 4);
		const values = 3 * 4 * 4;
		// A patch's channels have each frame's values, and a picture two equal frames.
		const rows = mergedOrder(grid!).flatMap((place) => {
			const patch = blocks.patches[0]!.subarray(place * values, (place + 1) * values);
			return [0, 1, 2].flatMap((channel) => {
				const own = patch.subarray((channel * values) / 3, ((channel + 1) * values) / 3);
				return [own, own];
			});
		});
		expect([grid!.rows, grid!.columns, digest(...rows)]).toEqual([...one.blocks]);
	},
);

test("an edge that is more than 200 times the other is refused", () => {
	expect(() => blockSize({ width: 201, height: 1 }, 8, { minPixels: 256, maxPixels: 6144 })).toThrow(
		"An image of 201 x 1 pixels is more than 200 times as long as wide.",
	);
});
