/** A picture as this program makes it for each family, as digests like those of transformers' processors. */
import { createHash } from "node:crypto";
import {
	type blockSize,
	type ImageSizing,
	patchGrids,
	planImages,
	type TowerGeometry,
} from "../../../src/data/vision-language/image-plan.ts";
import { decodedAs, imagePatches, inspectImage, type Resampling } from "../../../src/data/vision-language/pixels.ts";
import { type ChannelStatistics, clipStatistics, type Images } from "../../../src/native/images.ts";
import { mergedOrder } from "../../../src/parity/pictures/batches.ts";

export interface Processed {
	readonly siglip: string;
	readonly tiles: readonly [count: number, digest: string];
	/** Of the image alone, and of a sample with two. */
	readonly anyres: readonly [count: number, alone: string, one: string];
	/** Absent: an edge is too long. */
	readonly blocks?: readonly [rows: number, columns: number, digest: string];
	/** As `blocks`, of limits that count both frames of a patch. */
	readonly frames?: readonly [rows: number, columns: number, digest: string];
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
const planes: TowerGeometry = { patchSize: side, pixelShuffle: false, dropClassTokens: true, classTokens: 0 };
const small: TowerGeometry = { ...planes, patchSize: 4, pixelShuffle: true };
const tiling: ImageSizing = {
	...{ mode: "tiles", tileSize: side, minTiles: 1, maxTiles: 6 },
	...{ areaWeighted: false, thumbnail: true, tags: false },
};
const sizes = [1, 2, 3, 4].flatMap((rows) => [1, 2, 3, 4].map((columns) => [side * rows, side * columns] as const));
const anyres: ImageSizing = {
	...{ mode: "anyres", tileSize: side, maxTiles: 9 },
	pinpoints: sizes.map(([height, width]) => ({ height, width })),
};

interface Making {
	readonly sizing: ImageSizing;
	readonly tower: TowerGeometry;
	readonly statistics: ChannelStatistics;
	/** Images of the sample. */
	readonly count?: number;
	/** Rows of the text that they may have. */
	readonly rows?: number;
	readonly resampling?: Resampling;
}

/** The first image's plan and patches. */
function make(images: Images, file: Uint8Array, making: Making) {
	const { sizing, tower, statistics, count = 1, rows = 1_000_000, resampling = "torchvision" } = making;
	const image = decodedAs(inspectImage(images, file), "transformers");
	const [plan] = planImages(new Array(count).fill(image), rows, sizing, tower);
	return {
		plan: plan!,
		patches: imagePatches(images, { ...image, plan: plan!, statistics, resampling }, tower.patchSize),
	};
}

export function processed(images: Images, file: Uint8Array, { long }: { readonly long: boolean }): Processed {
	const made = (making: Making) => make(images, file, making);
	const fixed = made({ sizing: { mode: "fixed", width: side, height: side }, tower: planes, statistics: half });
	const tiles = made({ sizing: tiling, tower: planes, statistics: imageNet });
	const alone = made({ sizing: anyres, tower: planes, statistics: clipStatistics });
	const ofTwo = made({ sizing: anyres, tower: planes, statistics: clipStatistics, count: 2 });
	return {
		siglip: digest(...fixed.patches),
		tiles: [tiles.patches.length, digest(...tiles.patches)],
		anyres: [alone.patches.length, digest(...alone.patches), digest(...ofTwo.patches)],
		...(!long && {
			blocks: blocksOf(images, file, { minPixels: 256, maxPixels: 6144, minSide: 0 }, half),
			frames: blocksOf(images, file, { minPixels: 320, maxPixels: 6144, minSide: 8 }, clipStatistics),
		}),
	};
}

function blocksOf(
	images: Images,
	file: Uint8Array,
	limits: Parameters<typeof blockSize>[2],
	statistics: ChannelStatistics,
): NonNullable<Processed["blocks"]> {
	const blocks = make(images, file, { sizing: { mode: "blocks", ...limits }, tower: small, statistics });
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
	return [grid!.rows, grid!.columns, digest(...rows)];
}

/** Grid and values of Nemotron's processor, an image of which may have so many rows. */
export function patchesOfNemotron(images: Images, file: Uint8Array, rows: number) {
	const sizing: ImageSizing = { mode: "dynamic", minPatches: 4, maxPatches: 0, minSide: 0 };
	const making = { sizing, tower: small, statistics: clipStatistics, rows, resampling: "pillow" } as const;
	const { plan, patches } = make(images, file, making);
	return { grid: patchGrids(plan, 4)[0]!, values: patches[0]! };
}
