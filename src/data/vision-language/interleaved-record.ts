/**
 * Documents of text and images in the forms of OBELICS (`texts` and `images`; each place has either) and MMC4
 * (`text_list` and `image_info`, each image with the sentence that it belongs to).
 */
import { counted } from "../../system/counted.ts";

export interface InterleavedRecord {
	/** Text, and images by their number among `names`. */
	readonly fragments: readonly (string | { readonly image: number })[];
	/** How the record gives its images: names, or whatever else. */
	readonly names: readonly unknown[];
}

type Fields = Readonly<Record<string, unknown>>;

/** The document of a record; why it is none; or null where the record has no such form. */
export function interleavedRecord(record: Fields): InterleavedRecord | string | null {
	const { texts, images, text_list: sentences, image_info: info } = record;
	if (Array.isArray(sentences) && Array.isArray(info)) return mmc4(sentences, info);
	if (Array.isArray(texts) && Array.isArray(images) && texts.every((text) => text === null || isText(text))) {
		return obelics(texts, images);
	}
	return null;
}

const isText = (value: unknown): value is string => typeof value === "string";

function obelics(texts: readonly (string | null)[], images: readonly unknown[]): InterleavedRecord | string {
	if (texts.length !== images.length) {
		return `it has ${counted(texts.length, "text")} and ${counted(images.length, "image")}; each place of a document has one of both, null the other`;
	}
	const names: unknown[] = [];
	const fragments: (string | { image: number })[] = [];
	for (const [i, text] of texts.entries()) {
		const image = images[i];
		const hasImage = image !== null && image !== undefined && image !== "";
		if (hasImage && text) return `place ${i} of the document has both a text and an image`;
		if (text) fragments.push(text);
		if (hasImage) fragments.push({ image: names.push(image) - 1 });
	}
	return { fragments, names };
}

/** Images come before their sentences, as the SimilarityInterleavedSample of Energon has them. */
function mmc4(sentences: readonly unknown[], info: readonly unknown[]): InterleavedRecord | string {
	const texts = sentences.filter(isText);
	if (texts.length !== sentences.length) return "its text_list has an entry that is not text";
	const before = new Map<number, number[]>();
	const names: unknown[] = [];
	for (const entry of info) {
		if (typeof entry !== "object" || entry === null) return "its image_info has an entry that is not an image";
		const { image_name: name, matched_text_index: at, image_base64: coded, raw_url: url } = entry as Fields;
		const place = Number(at ?? 0);
		if (!(Number.isInteger(place) && place >= 0 && place < texts.length)) {
			return `an image of it belongs to text ${String(at).slice(0, 40)} of ${texts.length}`;
		}
		before.set(place, [...(before.get(place) ?? []), names.push(coded ?? name ?? url ?? null) - 1]);
	}
	const fragments = texts.flatMap((text, i) => [
		...(before.get(i) ?? []).map((image) => ({ image })),
		i === 0 ? text : `\n${text}`,
	]);
	return { fragments, names };
}
