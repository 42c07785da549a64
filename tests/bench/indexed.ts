/** Megatron's indexed data: tokens a second that a core reads in the order of training, and lines of JSON that become such data. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { IndexedWriter } from "../../src/data/megatron/indexed-file.ts";
import { IndexedFiles } from "../../src/data/megatron/splits.ts";
import { executable } from "../commands/mimo.ts";
import { type Row, row } from "./measure.ts";

const vocabularySize = 65_000;
const sequenceLength = 4096;
const documents = 100_000;
/** Mean tokens of a document. */
const meanLength = 500;
/** Tokens that a core is to read in a second. */
const wanted = 1e7;

/** An interpreter with megatron-core and transformers: MIMO_PYTHON; null when there is none. */
export function findMegatron(): string | null {
	const python = process.env.MIMO_PYTHON;
	if (!python) return null;
	const script = "import megatron.core.datasets.indexed_dataset, transformers, sys; sys.exit(0)";
	return Bun.spawnSync([python, "-c", script]).success ? python : null;
}

/** Seconds of this process's processors. */
function processorSeconds(run: () => void): number {
	const before = process.cpuUsage();
	run();
	const { user, system } = process.cpuUsage(before);
	return (user + system) / 1e6;
}

export function benchIndexed(megatron: string | null): Row[] {
	const folder = mkdtempSync(join(tmpdir(), "mimo-indexed-"));
	try {
		return [...readingRows(folder), ...(megatron === null ? [] : [preparingRow(folder, megatron)])];
	} finally {
		rmSync(folder, { recursive: true });
	}
}

/** Processor seconds of a million tokens, in the order of training and in making the order, against what is wanted. */
function readingRows(folder: string): Row[] {
	const prefix = join(folder, "documents");
	using writer = new IndexedWriter(prefix, vocabularySize);
	for (let i = 0; i < documents; i++) {
		const length = 1 + ((i * 7919) % (2 * meanLength));
		const ids = Int32Array.from({ length }, (_, at) => (i * 31 + at * 17) % vocabularySize);
		writer.add(ids, [length]);
	}
	writer.finish();
	using files = new IndexedFiles({ sequenceLength, vocabularySize, seed: 1234, surplus: 0.005 });
	const samples = Math.floor((documents * meanLength) / sequenceLength);
	let source = null as ReturnType<IndexedFiles["split"]> | null;
	const options = { bounds: [0, 1] as const, samples, ownBlend: false, name: "train" };
	const ordering = processorSeconds(() => {
		source = files.split({ prefixes: [prefix], weights: null }, options);
	});
	const reading = processorSeconds(() => {
		for (let i = 0; i < samples; i++) source!.sample(i);
	});
	const millions = (samples * sequenceLength) / 1e6;
	const what = { group: "indexed data", shape: "10⁶ tokens", threads: 1, baseline: "10⁷ tokens/s", target: 1 };
	return [
		row({ ...what, operation: "open and order" }, [ordering / millions, 1e6 / wanted]),
		row({ ...what, operation: "read" }, [reading / millions, 1e6 / wanted]),
	];
}

/** Processor seconds of both programs with one worker, which write the same bytes. */
function preparingRow(folder: string, megatron: string): Row {
	const root = join(import.meta.dir, "../..");
	const tokenizer = join(folder, "tokenizer");
	const compressed = readFileSync(join(root, "tests/golden/tokenizers/tokenizer.json.zst"));
	const settings = JSON.stringify({ tokenizer_class: "PreTrainedTokenizerFast" });
	Bun.spawnSync(["mkdir", tokenizer]);
	writeFileSync(join(tokenizer, "tokenizer.json"), Bun.zstdDecompressSync(compressed));
	writeFileSync(join(tokenizer, "tokenizer_config.json"), settings);
	const texts = [...new Bun.Glob("{src,docs,tests}/**/*.{ts,md}").scanSync(root)].sort();
	const lines = texts.map((file) => JSON.stringify({ text: readFileSync(join(root, file), "utf8") }));
	const input = join(folder, "lines.jsonl");
	writeFileSync(input, lines.join("\n"));
	const flags = ["--input", input, "--output-prefix", join(folder, "ours"), "--tokenizer", tokenizer];
	flags.push("--tokenizer-type", "HuggingFaceTokenizer", "--workers", "1");
	const ours = Bun.spawnSync([executable, "data", "prepare-text", ...flags], { stderr: "inherit" });
	if (!ours.success) throw new Error("mimo data prepare-text failed.");
	const theirs = join(folder, "theirs_text_document");
	const script = join(import.meta.dir, "preprocess_reference.py");
	const reference = Bun.spawnSync([megatron, script, input, theirs, tokenizer], {
		env: { ...process.env, TOKENIZERS_PARALLELISM: "false" },
	});
	const seconds = Number(reference.stdout.toString().trim().split("\n").at(-1));
	for (const suffix of ["bin", "idx"]) {
		const [own, other] = [join(folder, "ours_text_document"), theirs].map((name) => readFileSync(`${name}.${suffix}`));
		if (!own!.equals(other!)) throw new Error(`prepare-text and Megatron's builder write different .${suffix} files.`);
	}
	const what = { group: "indexed data", operation: "prepare-text", shape: "this repository", threads: 1 };
	const { user, system } = ours.resourceUsage.cpuTime;
	return row({ ...what, baseline: "Megatron-LM", target: 1 }, [Number(user + system) / 1e6, seconds]);
}
