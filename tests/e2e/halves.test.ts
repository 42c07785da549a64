/** Folders of fp16 weights, as Llama 2 and LLaVA are published: trained from as their fp32 values, and written back as fp16. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { encodeFloats } from "../../src/checkpoint/dtype.ts";
import { openSafetensors, writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
import { loggedSteps, SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());

/** The folder with its weights rounded to fp16 and stored as `dtype`. */
function rounded(folder: string, dtype: "F16" | "F32"): void {
	mkdirSync(run.path(folder));
	const [from, source] = [golden("llama"), openSafetensors(join(golden("llama"), "model.safetensors"))];
	using _ = source;
	const entries = [...source.tensors.keys()].map((name) => {
		const values = Float16Array.from(source.read(name) as Float32Array);
		const data = () => (dtype === "F16" ? encodeFloats("F16", values) : Float32Array.from(values));
		return { name, dtype, shape: source.information(name).shape, data };
	});
	writeSafetensors(run.path(`${folder}/model.safetensors`), entries);
	const config = readFileSync(join(from, "config.json"), "utf8");
	writeFileSync(
		run.path(`${folder}/config.json`),
		dtype === "F16" ? config.replace(/("(?:torch_)?dtype": )"float32"/, '$1"float16"') : config,
	);
}

beforeAll(() => {
	rounded("half", "F16");
	rounded("whole", "F32");
});

const bytes = (path: string) => readFileSync(run.path(path));

function train(name: string, flags: string): number[] {
	const lengths = "--seq-length 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --split 99,1,0";
	const args = `train --data-path text.txt ${lengths} --log-json ${name}.jsonl ${deviceFlags} ${flags}`.split(" ");
	const { exitCode, stderr } = mimo(args, run.folder);
	expect([exitCode, stderr]).toEqual([0, ""]);
	return loggedSteps(run.path(`${name}.jsonl`)).map((step) => step["lm loss"] as number);
}

test("a training from fp16 is that from the same values in fp32, and saves fp16", () => {
	expect(train("half-steps", "--load-hf half --lr 1e-3")).toEqual(train("whole-steps", "--load-hf whole --lr 1e-3"));
	train("still", "--load-hf half --lr 0 --min-lr 0 --save-hf made/later/same");
	expect(bytes("made/later/same/model.safetensors")).toEqual(bytes("half/model.safetensors"));
	expect(bytes("made/later/same/config.json")).toEqual(bytes("half/config.json"));
});

test("a native checkpoint of fp16 weights is trained from", () => {
	expect(mimo(["convert-ckpt", "--to", "native", "half", "native"], run.folder).exitCode).toBe(0);
	const flags = "--pretrained-checkpoint native --load-hf half --lr 0 --min-lr 0 --save-hf again";
	train("native-steps", flags);
	expect(bytes("again/model.safetensors")).toEqual(bytes("half/model.safetensors"));
});

test("a value beyond fp16 is named, not made infinite", () => {
	mkdirSync(run.path("large"));
	copyFileSync(run.path("whole/config.json"), run.path("large/config.json"));
	using source = openSafetensors(run.path("whole/model.safetensors"));
	const entries = [...source.tensors.keys()].map((name) => {
		const { dtype, shape } = source.information(name);
		const data = () =>
			name === "model.norm.weight" ? (source.read(name) as Float32Array).fill(70000) : source.read(name);
		return { name, dtype, shape, data };
	});
	writeSafetensors(run.path("large/model.safetensors"), entries);
	const { exitCode, stderr } = mimo(["convert-ckpt", "--to", "hf", "--dtype", "F16", "large", "narrow"], run.folder);
	expect([exitCode, stderr]).toEqual([
		1,
		expect.stringMatching(/final_norm\.weight in .* holds 70000, beyond the largest value of F16 \(65504\)\.\n$/),
	]);
});
