import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { golden } from "../golden.ts";
import { mimo } from "./mimo.ts";

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-convert-ckpt-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const tiny = golden("hybrid-tiny");
const convert = (...args: string[]) => mimo(["convert-ckpt", ...args], folder);

describe("convert-ckpt", () => {
	test("hf → native → hf, verified", () => {
		const first = convert("--from", "hf", "--to", "native", "--verify", tiny, "native");
		expect([first.exitCode, first.stderr]).toEqual([0, ""]);
		expect(first.stdout).toContain("native/release: 69 tensors, 1.1 MB in");
		expect(first.stdout).toContain("Verified: 69 tensors are equal on both sides.");
		const back = convert("--to", "hf", "--sync", "native", "hf");
		expect([back.exitCode, back.stderr]).toEqual([0, ""]);
		const file = "model.safetensors";
		expect(readFileSync(join(folder, "hf", file)).equals(readFileSync(join(tiny, file)))).toBe(true);
	});

	test("a dry run prints the plan and writes nothing", () => {
		const { exitCode, stdout } = convert("--to", "torch_dist", "--dry-run", tiny, "planned");
		expect(exitCode).toBe(0);
		expect(stdout).toContain("decoder.final_norm.weight  [64] F32  ← model.norm_f.weight\n");
		expect(stdout).toContain("57 tensors, 1.1 MB; nothing was written.");
		const json = JSON.parse(convert("--to", "native", "--dry-run", "--json", tiny, "planned").stdout);
		expect(json.length).toBe(69);
		expect(Object.keys(json[0])).toEqual(["from", "to", "dtype", "shape", "bytes"]);
		expect(existsSync(join(folder, "planned"))).toBe(false);
	});

	test("inspect as text and as JSON", () => {
		const { exitCode, stdout } = convert("inspect", tiny);
		expect(exitCode).toBe(0);
		expect(stdout).toMatch(/^model\.norm_f\.weight +F32 +\[64\] +256 B +[0-9a-f]{64}$/m);
		expect(stdout).toEndWith("hf, 43 tensors, 1.1 MB\n");
		const { tensors } = JSON.parse(convert("inspect", "--json", "--no-checksums", tiny).stdout);
		expect(tensors[0].sha256).toBeNull();
		expect(convert("inspect", "--no-checksums", join(tiny, "model.safetensors")).stdout).toContain("safetensors, 43");
	});

	test("several shards, other names, half precision", () => {
		const { exitCode } = convert(
			"--to=hf",
			"--hf-names=published",
			"--dtype=bf16",
			"--max-shard-size=100000B",
			tiny,
			"shards",
		);
		expect(exitCode).toBe(0);
		expect(readdirSync(join(folder, "shards"))).toContain("model.safetensors.index.json");
		const { tensors } = JSON.parse(convert("inspect", "--json", "shards").stdout);
		const dtypes = Object.fromEntries(tensors.map(({ name, dtype }: { name: string; dtype: string }) => [name, dtype]));
		expect(dtypes["backbone.embeddings.weight"]).toBe("BF16");
		expect(dtypes["backbone.layers.0.mixer.A_log"]).toBe("F32");
	});

	test("invalid requests get a sentence and an exit code", () => {
		const refuse = (args: string[], exitCode: number, sentence: string) => {
			const outcome = convert(...args);
			expect(outcome.stderr).toContain(sentence);
			expect(outcome.stderr.trim().split("\n").length).toBe(1);
			expect(outcome.exitCode).toBe(exitCode);
		};
		refuse(["--to", "native", tiny, "native"], 1, "the folder is not empty (--force replaces it)");
		refuse(["--to", "native", tiny], 2, "The command is `mimo convert-ckpt --from F --to F SOURCE TARGET`");
		refuse([tiny, "x"], 2, "--to is missing");
		refuse(["--to", "gguf", tiny, "x"], 2, '--to is "gguf"; allowed is hf, native, torch_dist');
		refuse(["--from", "native", "--to", "hf", tiny, "x"], 1, "is a hf checkpoint, not a native one");
		refuse(["--to", "hf", "--dtype", "int8", tiny, "x"], 2, '--dtype is "int8"; allowed is F32, BF16, F16, F64.');
		refuse(
			["--to", "hf", "--max-shard-size", "big", tiny, "x"],
			2,
			'--max-shard-size is "big"; allowed is a size such as 500MB or 5GB.',
		);
		refuse(["--to", "hf", "--hf-name", "published", tiny, "x"], 2, "the nearest is --hf-names");
		refuse(["--to", "native", "--layer-names", "gpt", tiny, "x"], 2, "--layer-names gpt needs --to torch_dist");
		refuse(["--to", "native", "--layer-names", "logical", tiny, "x"], 2, "--layer-names logical needs the groups");
		refuse(["--to", "torch_dist", "--layer-names", "gpt", tiny, "x"], 1, "is of no GPT model: it has 1 * and 3 - or E");
		refuse(["inspect"], 2, "`mimo convert-ckpt inspect PATH`");
		refuse(["inspect", folder], 1, "is not a checkpoint of a known format");
		refuse(["inspect", "absent"], 1, "Cannot open absent: it does not exist.");
		refuse(["--to", "native", "absent", "x"], 1, "Cannot open absent: it does not exist.");
		expect(existsSync(join(folder, "x"))).toBe(false);
	});

	test("a pickle that calls os.system is refused by name", () => {
		const evil = join(folder, "evil");
		const made = convert("--to", "torch_dist", tiny, "evil");
		expect(made.exitCode).toBe(0);
		const marker = join(folder, "called");
		const command = `touch ${marker}`;
		const pickle = `\x80\x02cos\nsystem\nX${String.fromCharCode(command.length)}\0\0\0${command}\x85R.`;
		writeFileSync(join(evil, "release", ".metadata"), Buffer.from(pickle, "latin1"));
		const { exitCode, stderr } = convert("--to", "native", "evil", "x");
		expect(exitCode).toBe(1);
		expect(stderr).toContain("os.system is not on the list of allowed names");
		expect(existsSync(marker)).toBe(false);
	});
});
