/** Data sets that the runs read: text, captioned pictures, conversations about several pictures, and blends of them. */
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defaultPrepareOptions, prepare } from "../../../../src/data/energon/prepare/prepare.ts";
import { caption, type Member, png, tar } from "../../../data/fixtures.ts";

/** Samples of a shard, of which every set has four, the last one for validation. */
const samplesOfShard = 24;
const shards = 4;

/** Samples of the validation part of every set. */
export const heldOutSamples = samplesOfShard;

function writeSet(
	folder: string,
	members: (index: number) => readonly Member[],
	sampleType: string,
	fields: string | null,
): void {
	mkdirSync(folder);
	for (let shard = 0; shard < shards; shard++) {
		const samples = Array.from({ length: samplesOfShard }, (_, at) => members(samplesOfShard * shard + at));
		writeFileSync(join(folder, `shard-${shard}.tar`), tar(samples.flat()));
	}
	const fieldMap = fields === null ? {} : { fieldMap: fields };
	prepare(folder, { ...defaultPrepareOptions, splitRatio: "3,1,0", sampleType, ...fieldMap });
}

const picture = (i: number, name = "") => png(8 * (1 + (i % 3)), 8 * (1 + (i % 2)), i + name.length);

/** Turns about no, one, two or three pictures. */
function talk(i: number): Member[] {
	const count = i % 4;
	const names = Array.from({ length: count }, (_, n) => `img${n}`);
	const places = names.map(() => ({ type: "image" }));
	const messages = [
		...(i % 5 === 0 ? [{ role: "system", content: "Be brief." }] : []),
		{ role: "user", content: [...places, { type: "text", text: `Q${i}?` }] },
		{ role: "assistant", content: `A ${"x".repeat((i * 5) % 9)}` },
		...(i % 3 === 0
			? [
					{ role: "user", content: "More?" },
					{ role: "assistant", content: `No ${i}.` },
				]
			: []),
	];
	return [
		[`t${i}.json`, JSON.stringify({ messages })],
		...names.map((name): Member => [`t${i}.${name}.png`, picture(i, name)]),
	];
}

/** What every turn becomes; of pictures the placeholder of a byte model. */
const chatTemplate =
	"{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}" +
	"{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}{% endif %};{% endfor %}" +
	"{% if add_generation_prompt %}a:{% endif %}";

const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n";

/** Two sets by weights, or so many epochs of each; validation reads the first alone. */
function writeBlends(folder: string, name: string, first: string, second: string): void {
	const valid = `  val:\n    path: ./${first}\n`;
	const settings = "{mimo: {caption-prompt: Say., data-too-long: truncate}}";
	writeFileSync(
		join(folder, `${name}.yaml`),
		`${head}  train:\n    blend:\n      - {path: ./${first}, weight: 3, subflavors: ${settings}}\n      - {path: ./${second}, weight: 1}\n${valid}`,
	);
	writeFileSync(
		join(folder, `${name}-epochs.yaml`),
		`${head}  train:\n    blend_epochized:\n      - {path: ./${first}, repetitions: 1}\n      - {path: ./${second}, repetitions: 0.5}\n${valid}`,
	);
}

/** Names of the sets with pictures, and of those without. */
export const setsOf = {
	pictures: ["captions", "captions", "talks", "talks", "mixed.yaml", "mixed-epochs.yaml"],
	text: ["texts", "texts", "written.yaml", "written-epochs.yaml"],
} as const;

/** Fills a folder with all sets, `text.txt` and `chat.jinja`. */
export function writeData(folder: string): void {
	const words = ["in", "the", "beginning", "was", "a", "word", "and", "it", "ended", "here"];
	let state = 1;
	const text = Array.from({ length: 3000 }, () => {
		state = (state * 48271) % 2147483647;
		return words[state % words.length];
	});
	writeFileSync(join(folder, "text.txt"), text.join(" "));
	writeFileSync(join(folder, "chat.jinja"), chatTemplate);
	const written = (i: number): Member => [`s${i}.txt`, caption(i)];
	const lines = (i: number): Member => [`l${i}.txt`, `line ${i} ${"and ".repeat(i % 5)}`];
	const captioned = (i: number): Member[] => [[`s${i}.png`, picture(i)], written(i)];
	writeSet(join(folder, "texts"), (i) => [written(i)], "TextSample", '{"text": "txt"}');
	writeSet(join(folder, "lines"), (i) => [lines(i)], "TextSample", '{"text": "txt"}');
	writeSet(join(folder, "captions"), captioned, "CaptioningSample", '{"image": "png", "caption": "txt"}');
	writeSet(join(folder, "talks"), talk, "CrudeWebdataset", null);
	writeBlends(folder, "written", "texts", "lines");
	writeBlends(folder, "mixed", "captions", "talks");
}
