/** A digest of everything in a microbatch: keys, every tensor, sizes. */
import type { ImageTextBatch } from "../../src/data/vision-language/batch.ts";

export function batchDigest({ names, text, images }: ImageTextBatch): string {
	const hash = new Bun.CryptoHasher("sha256");
	const arrays = [text.ids, text.labels, text.lossMask, images.patches];
	for (const array of arrays) hash.update(array);
	const rest = [names, text.lengths, text.samples, images.grids, images.imagesPerSample];
	return hash.update(JSON.stringify(rest)).digest("hex");
}
