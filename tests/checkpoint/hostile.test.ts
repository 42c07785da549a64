/** Checkpoints that claim too much, or hold something else than files: refused by name, in bounded time and memory. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
	cpSync,
	mkdirSync,
	mkdtempSync,
	readFileSync,
	rmSync,
	symlinkSync,
	truncateSync,
	writeFileSync,
} from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openSource, planConversion } from "../../src/checkpoint/conversion/convert.ts";
import { fromLayout } from "../../src/checkpoint/conversion/layouts.ts";
import { OutputFile } from "../../src/checkpoint/files.ts";
import { openHuggingFaceModel } from "../../src/checkpoint/hf/parts.ts";
import { canonicalLayout } from "../../src/checkpoint/native/manifest.ts";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { metadataGlobals, stateGlobals } from "../../src/checkpoint/pickle/allowed.ts";
import { unpickle } from "../../src/checkpoint/pickle/machine.ts";
import { RawPickle, writeObject } from "../../src/checkpoint/pickle/writer.ts";
import { openSafetensors, writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import type { TensorStore, TensorType } from "../../src/checkpoint/store.ts";
import { readKeys } from "../../src/checkpoint/torch-dist/keys.ts";
import { readWholeFile } from "../../src/system/input-file.ts";
import { executable } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
import { conversionOptions } from "./conversion/options.ts";

const tiny = golden("hybrid-tiny");

let folder: string;
let count = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-hostile-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const newPath = (name = "") => join(folder, `${count++}${name}`);

function copyOf(path: string): string {
	const copy = newPath();
	cpSync(path, copy, { recursive: true });
	return copy;
}

/** Opens a source as a conversion does. */
type From = "hf" | "native" | "torch_dist";
const options = (from: From, source: string) => conversionOptions({ from, to: "native", source, target: "" });

function open(path: string, from: From): void {
	using _ = openSource(path, from, options(from, path));
}

/** Seconds after which a command hangs. */
const patience = 30;

describe.skipIf(!tiny)("something else in a file's place", () => {
	const whole: Record<From, string> = { hf: tiny!, native: "", torch_dist: "" };
	beforeAll(async () => {
		for (const to of ["native", "torch_dist"] as const) {
			whole[to] = newPath();
			using planned = planConversion(conversionOptions({ from: "hf", to, source: tiny!, target: whole[to] }));
			await planned.run(() => {});
		}
	});

	const kinds: Readonly<Record<string, (path: string, original: string) => unknown>> = {
		pipe: (path) => Bun.spawnSync(["mkfifo", path]),
		folder: (path) => mkdirSync(path),
		device: (path) => symlinkSync("/dev/zero", path),
		link: (path, original) => symlinkSync(original, path),
	};
	const places = [
		["hf", "config.json", Object.keys(kinds)],
		["hf", "model.safetensors", ["pipe"]],
		["hf", "model.safetensors.index.json", ["pipe"]],
		["native", "latest.json", ["pipe", "folder", "link"]],
		["native", "release/index.json", Object.keys(kinds)],
		["native", "release/data/r00000-000.safetensors", ["pipe", "link"]],
		["native", "release/objects.safetensors", ["pipe"]],
		["torch_dist", "latest_checkpointed_iteration.txt", ["pipe", "link"]],
		["torch_dist", "release/.metadata", Object.keys(kinds)],
		["torch_dist", "release/common.pt", ["pipe", "folder", "link"]],
		["torch_dist", "release/__0_0.distcp", ["pipe", "link"]],
	] as const;
	for (const [format, name, list] of places) {
		for (const kind of list) {
			test(`a ${kind} for ${name}`, () => {
				const source = copyOf(whole[format]);
				const path = join(source, name);
				rmSync(path, { force: true });
				kinds[kind]!(path, join(whole[format], name));
				const { exitCode, stderr } = Bun.spawnSync(
					[executable, "convert-ckpt", "--from", format, "--to", "native", source, newPath()],
					{ timeout: patience * 1000, stderr: "pipe", stdout: "ignore", env: { ...process.env, MIMO_DEBUG: "0" } },
				);
				expect(stderr.toString()).toStartWith("mimo: ");
				expect(stderr.toString()).toContain(name.split("/").at(-1)!);
				expect(stderr.toString()).not.toContain("Unexpected");
				expect(stderr.toString().trim().split("\n")).toHaveLength(1);
				expect(exitCode).toBe(1);
			});
		}
	}

	test("a pipe among the files that --hf-reference copies", async () => {
		const reference = copyOf(tiny!);
		Bun.spawnSync(["mkfifo", join(reference, "tokenizer.json")]);
		const command = [executable, "convert-ckpt", "--to", "hf", "--hf-reference", reference, tiny!, newPath()];
		const { exitCode, stderr } = Bun.spawnSync(command, { timeout: patience * 1000, stderr: "pipe" });
		expect(stderr.toString()).toContain("tokenizer.json: it is not a regular file.");
		expect(exitCode).toBe(1);
	});

	test("a socket", async () => {
		const path = newPath();
		const server = createServer();
		await new Promise<void>((resolve) => server.listen(path, resolve));
		expect(() => readWholeFile(path, 10)).toThrow("it is not a regular file");
		server.close();
	});

	test("an object that index.json says is larger than its file", () => {
		for (const bytes of [2 ** 53 - 1, 2 ** 45, 2 ** 36, 2 ** 33]) {
			const source = copyOf(whole.native);
			const path = join(source, "release/index.json");
			const manifest = JSON.parse(readFileSync(path, "utf8"));
			const { bytes: stored } = manifest.objects["huggingface/config.json"];
			manifest.objects["huggingface/config.json"].bytes = bytes;
			writeFileSync(path, JSON.stringify(manifest));
			expect(() => open(join(source, "release"), "native")).toThrow(
				`objects.safetensors: object huggingface/config.json has ${stored} bytes, index.json says ${bytes}.`,
			);
		}
	});

	test("hostile state: file and key are named", () => {
		const item = (code: string) => new RawPickle(Buffer.from(code, "latin1"));
		const deep = `)${"\x85".repeat(300)}`;
		const itself = "]q\x00h\x00a";
		let laughs = "]q\x00";
		for (let i = 0; i < 60; i++)
			laughs += `](h${String.fromCharCode(i)}h${String.fromCharCode(i)}eq${String.fromCharCode(i + 1)}`;
		laughs = `(${laughs}\x74`;
		for (const [key, code] of [
			["content_metadata", deep],
			["args", itself],
			["optimizer", laughs],
		] as const) {
			const source = copyOf(whole.torch_dist);
			const path = join(source, "release/common.pt");
			rmSync(path);
			using file = new OutputFile(path, { sync: false });
			writeObject(file, new Map([[key, item(code)]]));
			file.close();
			expect(() => open(source, "torch_dist")).toThrow(
				new RegExp(`common\\.pt: ${key}[.0-9]* has more than 64 levels`),
			);
		}
	});

	test("a checkpoint without its common state is read with a warning", () => {
		const source = copyOf(whole.torch_dist);
		const warnings = () => {
			using opened = openSource(source, "torch_dist", options("torch_dist", source));
			return opened.warnings;
		};
		expect(warnings()).toEqual([]);
		rmSync(join(source, "release/common.pt"));
		expect(warnings()).toEqual([
			`${join(source, "release")} has no common.pt, or an empty one: its iteration and settings are not known.`,
		]);
	});

	test("an optimizer's number in a name makes no list of that length", () => {
		const source = copyOf(whole.torch_dist);
		const path = join(source, "release/common.pt");
		rmSync(path);
		const chains = new Map(
			Array.from({ length: 70 }, (_, i) => [i, new Map([["optimizer", new Map([["param_groups", [new Map()]]])]])]),
		);
		using file = new OutputFile(path, { sync: false });
		writeObject(file, new Map([["optimizer", chains]]));
		file.close();
		expect(() => open(source, "torch_dist")).toThrow("module language has optimizer 65; at most 64 are read");
	});
});

describe.skipIf(!tiny)("counts that no tensor backs", () => {
	const config = () => JSON.parse(readFileSync(join(tiny!, "config.json"), "utf8"));

	function changed(change: object): string {
		const path = copyOf(tiny!);
		writeFileSync(join(path, "config.json"), JSON.stringify({ ...config(), ...change }));
		return path;
	}

	test("experts, in conversions and --load-hf", () => {
		const path = changed({ n_routed_experts: 2 ** 31 });
		for (const read of [() => open(path, "hf"), () => openHuggingFaceModel(path)]) {
			expect(read).toThrow(/config\.json: n_routed_experts (is|names) 2147483648/);
		}
	});

	test("experts of separate tensors, layers, vocabulary", async () => {
		const published = newPath();
		using planned = planConversion(
			conversionOptions({ from: "hf", to: "hf", source: tiny!, target: published, names: "published" }),
		);
		await planned.run(() => {});
		const path = join(published, "config.json");
		writeFileSync(path, JSON.stringify({ ...config(), n_routed_experts: 2 ** 31 }));
		expect(() => open(published, "hf")).toThrow("config.json: n_routed_experts names 2147483648, too many for the");
		const pattern = "M".repeat(1e6);
		const layers = { hybrid_override_pattern: pattern, layers_block_type: undefined, num_hidden_layers: 1e6 };
		expect(() => open(changed(layers), "hf")).toThrow("names 1000000, too many for the 43 tensors");
		expect(() => open(changed({ num_hidden_layers: 10 ** 15 }), "hf")).toThrow("num_hidden_layers is 1000000000000000");
		expect(() => open(changed({ vocab_size: 2 ** 40 }), "hf")).toThrow("expected [1099511627776, 64]");
	});

	function shapes(tensors: Readonly<Record<string, readonly number[]>>): TensorStore {
		return {
			path: "there",
			tensors: new Map(
				Object.entries(tensors).map(([name, shape]): [string, TensorType] => [name, { dtype: "F32", shape }]),
			),
			readInto: () => {},
			[Symbol.dispose]: () => {},
		};
	}

	test("stacked experts and layers without elements", () => {
		const experts = "language_model.decoder.layers.0.mlp.experts.linear_fc1.weight";
		const layout = { ...canonicalLayout, experts: "grouped", gluTensorParallel: 1 } as const;
		expect(() => fromLayout(shapes({ [experts]: [2 ** 40, 0] }), layout, "there")).toThrow(
			"there: a model of more than 1048576 tensors is not converted",
		);
		const stacked = shapes({ "decoder.layers.decoder.layers.mlp.linear_fc1.bias": [2 ** 40, 2 ** 10, 0] });
		expect(() => readKeys(stacked.tensors, "there")).toThrow("has the shape [1099511627776, 1024, 0], no elements");
	});
});

describe("bounds", () => {
	test("bytes of a file are compared before it is read", () => {
		const path = newPath();
		writeFileSync(path, "");
		truncateSync(path, 2 ** 40);
		expect(() => readWholeFile(path, 2 ** 27)).toThrow(`${path} has 1099511627776 bytes, more than the 134217728`);
	});

	test("tensors and values of a safetensors header", () => {
		const entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}';
		const header = (text: string) => {
			const path = newPath(".safetensors");
			const bytes = Buffer.alloc(8 + text.length, text, "latin1");
			bytes.fill(text, 8);
			bytes.writeBigUInt64LE(BigInt(text.length), 0);
			writeFileSync(path, bytes);
			return path;
		};
		const tensors = (n: number) => `{${Array.from({ length: n }, (_, i) => `"t${i}":${entry}`).join(",")}}`;
		using most = openSafetensors(header(tensors(2 ** 18)));
		expect(most.tensors.size).toBe(2 ** 18);
		const refused = "more than 262144 tensors or 8388608 values";
		expect(() => openSafetensors(header(tensors(2 ** 18 + 1)))).toThrow(refused);
		expect(() => openSafetensors(header(`{"a":[${"0,".repeat(2 ** 23)}0]}`))).toThrow(refused);
		expect(() => openSafetensors(header(`{"a":${"[".repeat(1e6)}`))).toThrow("nested too deeply");
	});

	test("values and depth of an index", () => {
		const path = newPath();
		mkdirSync(path);
		const index = join(path, "index.json");
		writeFileSync(index, `{"pad":[${"0,".repeat(2 ** 23)}0]}`);
		expect(() => NativeCheckpoint.open(path)).toThrow(`${index} has more than 8388608 values.`);
		writeFileSync(index, `{"pad":${"[".repeat(1e6)}`);
		expect(() => NativeCheckpoint.open(path)).toThrow(`${index} is nested more than 128 levels deep.`);
	});

	test("values that a pickle makes, and copies that its calls make", () => {
		const made = Buffer.concat([Buffer.from("\x80\x04", "latin1"), Buffer.alloc(2 ** 23 * 3 + 6, "]\x940", "latin1")]);
		expect(() => unpickle(made, "f", { allowed: metadataGlobals })).toThrow("f: the pickle is refused at byte");
		expect(() => unpickle(made, "f", { allowed: metadataGlobals })).toThrow("it makes more than 8388608 values");
		const list = Buffer.alloc(2 * 50_000, "K\x01", "latin1");
		const copies = Buffer.alloc(200 * 7, "h\x01h\x00\x85R0", "latin1");
		const calls = Buffer.concat([
			Buffer.from("\x80\x02](", "latin1"),
			list,
			Buffer.from("eq\x00cbuiltins\nset\nq\x01", "latin1"),
			copies,
		]);
		expect(() => unpickle(calls, "f", { allowed: stateGlobals() })).toThrow("it makes more than 8388608 values");
		const path = Buffer.from(
			`\x80\x02X\xff\x00\x00\x00${"a".repeat(255)}q\x00cpathlib\nPosixPath\n(${"h\x00".repeat(20)}tR.`,
			"latin1",
		);
		expect(() => unpickle(path, "f", { allowed: metadataGlobals })).toThrow("a path is too long");
	});

	test("an error shortens a hostile name and has no terminal escapes", () => {
		const path = newPath(".safetensors");
		const name = `\u001b[31m${"n".repeat(100_000)}`;
		writeSafetensors(path, [{ name: "a", dtype: "U8", shape: [1], data: () => new Uint8Array(1) }]);
		using file = openSafetensors(path);
		try {
			file.information(name);
			expect.unreachable();
		} catch (error) {
			const { message } = error as Error;
			expect(message.length).toBeLessThan(10_000);
			expect(message).toContain(`${path} has no tensor \\x1b[31mnnn`);
			expect(message).toContain(" … ");
		}
	});
});
