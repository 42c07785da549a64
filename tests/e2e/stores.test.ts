/** Commands that read models from stores and write them there, compared with the same commands on folders: an S3 server, and a plain HTTP server. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { ObjectStore } from "../../src/checkpoint/remote/object-store.ts";
import { defaultRequests } from "../../src/checkpoint/remote/requests.ts";
import { plainServer } from "../checkpoint/remote/plain-server.ts";
import { StoreServer } from "../checkpoint/remote/store-server.ts";
import { deviceFlags, executable } from "../commands/mimo.ts";
import { referencePython } from "../reference/python.ts";
import { CheckpointRuns } from "./checkpoint-runs.ts";

const python = referencePython("moto");
const runs = new CheckpointRuns();
afterAll(() => runs[Symbol.dispose]());

/** Starts `mimo` beside the gate, which is in this process, with a cache of its own. */
function start(args: string, environment: Readonly<Record<string, string>>) {
	return Bun.spawn([executable, ...args.split(" ")], {
		cwd: runs.folder,
		env: { PATH: process.env.PATH, HOME: runs.folder, ...environment },
		stdio: ["ignore", "pipe", "pipe"],
	});
}

async function mimo(args: string, environment: Readonly<Record<string, string>> = {}) {
	const child = start(args, environment);
	const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
	return { exitCode: await child.exited, stdout, stderr };
}

/** Standard output of a command that ends well. */
async function well(args: string, environment: Readonly<Record<string, string>> = {}): Promise<string> {
	const { exitCode, stdout, stderr } = await mimo(args, environment);
	expect({ args, exitCode, stderr: exitCode === 0 ? "" : stderr }).toEqual({ args, exitCode: 0, stderr: "" });
	return stdout;
}

/** Names of the files that `work` writes, in order; calls `met` at the writing with that number. */
async function requestsOf(server: StoreServer, work: () => Promise<void>, number = 0, met: () => void = () => {}) {
	const names: string[] = [];
	server.watch = (head) => {
		const [, name] = /^PUT \S*\/([^/?\s]+)/.exec(head) ?? [];
		if (name !== undefined && names.push(name) === number) met();
	};
	await work();
	server.watch = null;
	return names;
}

/** Kills a rank of a launcher. */
function killRank(launcher: number, rank: number): void {
	const children = readFileSync(`/proc/${launcher}/task/${launcher}/children`, "utf8").trim().split(" ").map(Number);
	const mine = children.filter((pid) => readFileSync(`/proc/${pid}/environ`, "utf8").includes(`\0RANK=${rank}\0`));
	for (const pid of mine) process.kill(pid, "SIGKILL");
	if (mine.length !== 1) throw new Error(`${mine.length} processes of ${children.length} are rank ${rank}.`);
}

const sizes =
	"--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --kv-channels 8 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8 --mamba-chunk-size 16 --ffn-hidden-size 48 --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24 --seq-length 24 --micro-batch-size 1 --global-batch-size 2";
const run = `${sizes} --lr 2e-3 --lr-decay-iters 40 --log-interval 1 --data-path text.txt --split 100,0,0 ${deviceFlags}`;
const train = (more: string) => `train --preset nemotron-tiny ${run} ${more}`;
const answers = `--prompt hello --max-new-tokens 4 --bytes --json ${deviceFlags}`;
const losses = (text: string) => text.match(/lm loss: \S+/g);

beforeAll(async () => {
	writeFileSync(runs.path("text.txt"), "in the beginning was the word ".repeat(60));
	await well(train("--llm-tp 2 --train-iters 2 --save whole --save-interval 1 --save-hf whole-hf"));
}, 120_000);

describe.each(["s3", "http"] as const)("%s", (kind) => {
	const skips = kind === "s3" && python === null;
	let server: StoreServer;
	let root: string;
	beforeAll(async () => {
		if (skips) return;
		const plain = kind === "http" ? plainServer() : null;
		server = plain === null ? await StoreServer.start(python!) : await StoreServer.before(plain.url, plain.stop);
		root = kind === "s3" ? "s3://bucket/runs" : `${server.endpoint}/runs`;
	}, 60_000);
	afterAll(async () => await server?.[Symbol.asyncDispose](), 60_000);
	const stored = async (args: string) => await well(args, server.environment);

	test.skipIf(skips)(
		"a run saves checkpoints and a Hugging Face folder there, which others read as if they lay in folders",
		async () => {
			const saves = `--save ${root}/run --save-interval 1 --keep 1 --save-hf ${root}/hf`;
			// A request that fails once, or is damaged, is repeated.
			server.arm("503 four times", 9);
			expect(await stored(train(`--llm-tp 2 --train-iters 2 ${saves}`))).toContain(
				`Files: checkpoints ${root}/run, weights ${root}/hf.`,
			);
			expect(server.disarm()).toBe(4);
			// No weights stay on the host.
			const cache = readdirSync(runs.path(".cache/mimo"), { recursive: true }).map(String);
			expect(cache.filter((name) => name.endsWith("model.safetensors") && !name.includes("-copy/"))).toEqual([]);
			server.arm("wrong bytes received", 4);
			const listed = await stored(`convert-ckpt inspect ${root}/hf`);
			server.disarm();
			expect(listed).toBe((await well("convert-ckpt inspect whole-hf")).replace("whole-hf: ", "hf: "));
			expect(await stored(`generate --load ${root}/run ${answers}`)).toBe(
				await well(`generate --load whole ${answers}`),
			);
			const measure = `--data text.txt --samples 4 ${deviceFlags}`;
			expect(await stored(`evaluate --load-hf ${root}/hf ${measure}`)).toBe(
				await well(`evaluate --load-hf whole-hf ${measure}`),
			);
			const fresh = (hf: string) => train(`--llm-tp 2 --train-iters 1 --load-hf ${hf}`);
			const begun = await stored(fresh(`${root}/hf`));
			expect(begun).toContain(`Weights: language model of ${root}/hf.`);
			expect(losses(begun)).toEqual(losses(await well(fresh("whole-hf"))));
			expect(losses(begun)).toHaveLength(1);
			// The same training goes on, and replaces its folder.
			const further = await stored(train(`--llm-tp 2 --train-iters 3 --load ${root}/run ${saves}`));
			expect(further).toContain(`weights ${root}/hf.`);
			expect(await stored(`convert-ckpt inspect ${root}/hf`)).not.toBe(listed);
		},
		240_000,
	);

	test.skipIf(skips)(
		"conversions read and write there, and compare both sides",
		async () => {
			const convert = async (args: string) =>
				expect(await stored(`convert-ckpt --verify ${args}`)).toContain("Verified: 62 tensors");
			await convert(`--to native whole-hf ${root}/native`);
			await convert(`--to torch_dist ${root}/native ${root}/megatron`);
			await convert(`--to hf ${root}/megatron ${root}/again --hf-reference whole-hf`);
			const other = await mimo(`convert-ckpt --to hf whole ${root}/again`, server.environment);
			expect([other.exitCode, other.stderr]).toEqual([
				1,
				`mimo: Cannot write to ${root}/again: there are files (--force replaces them).\n`,
			]);
			await convert(`--to hf --force whole ${root}/again`);
			expect(await stored(`plan --load-hf ${root}/again`)).toContain("TFLOP/s");
		},
		240_000,
	);

	test.skipIf(skips)(
		"a rank that is killed while it sends a Hugging Face folder leaves none, and the same training puts it there",
		async () => {
			const table: Record<string, Record<string, string>> = {};
			const whole = (await well("convert-ckpt inspect whole-hf")).replace("whole-hf: ", "killed-hf: ");
			const save = train(`--llm-tp 2 --load whole --train-iters 2 --save-hf ${root}/killed-hf`);
			const [, ...puts] = await requestsOf(server, async () => void (await stored(save)));
			expect(await stored(`convert-ckpt inspect ${root}/killed-hf`)).toBe(whole);
			// The first is that of a probe, before the training.
			for (const number of process.env.MIMO_TEST_FULL ? puts.keys() : [1]) {
				const child = start(save, server.environment);
				const asked = await requestsOf(
					server,
					async () => void (await child.exited),
					number + 2,
					() => killRank(child.pid, 0),
				);
				expect(await child.exited).not.toBe(0);
				const reader = await mimo(`convert-ckpt inspect ${root}/killed-hf`, server.environment);
				const last = number === puts.length - 1;
				// A request that has come may be done after its sender's end.
				const shown = last && reader.exitCode === 0 ? whole : "";
				expect([reader.stdout, shown === "" ? reader.stderr : ""]).toEqual([
					shown,
					shown === ""
						? `mimo: ${root}/killed-hf is not whole: it is being written, or what wrote it was cut off.\n`
						: "",
				]);
				await stored(save);
				expect(await stored(`convert-ckpt inspect ${root}/killed-hf`)).toBe(whole);
				table[asked.at(-1)!] = { "after the kill": shown === "" ? "not whole" : "whole", "saved again": "whole" };
			}
			if (process.env.MIMO_TEST_FULL) console.table(table);
		},
		600_000,
	);

	test.skipIf(skips)(
		"what cannot be read or written is one sentence",
		async () => {
			const said = async (args: string) => {
				const { exitCode, stdout, stderr } = await mimo(args, server.environment);
				expect({ args, exitCode, stdout }).toEqual({ args, exitCode: expect.any(Number), stdout: "" });
				expect(exitCode).not.toBe(0);
				return stderr;
			};
			expect(await said(`generate --load ${root}/none ${answers}`)).toMatch(
				/^mimo: \S+\/none holds no checkpoint: .*\.\n$/,
			);
			const foreign = `${root}/foreign`;
			const put = async (name: string, text: string) => {
				const store = new ObjectStore(foreign, defaultRequests, server.environment);
				await store.put(name, new TextEncoder().encode(text));
			};
			const putRecord = async (lineage: string | null, files: object | null) => {
				const sha256 = new Bun.CryptoHasher("sha256").update(JSON.stringify([lineage, files])).digest("hex");
				await put("mimo.json", JSON.stringify({ format: "mimo-folder", lineage, files, sha256 }));
			};
			await putRecord("other", null);
			expect(await said(`convert-ckpt inspect ${foreign}`)).toBe(
				`mimo: ${foreign} is not whole: it is being written, or what wrote it was cut off.\n`,
			);
			expect(await said(train(`--train-iters 1 --save-hf ${foreign}`))).toBe(
				`mimo: --save-hf ${foreign} exists, and this training has not written it: name another folder, or remove this one.\n`,
			);
			await putRecord(null, { "../../x": { bytes: 1, sha256: "" } });
			expect(await said(`convert-ckpt inspect ${foreign}`)).toBe(
				`mimo: ${foreign}/mimo.json names the file "..", which is not a plain file name.\n`,
			);
			await put("mimo.json", '{"format":"mimo-folder","lineage":null,"files":{},"sha256":""}');
			expect(await said(`convert-ckpt inspect ${foreign}`)).toBe(`mimo: ${foreign}/mimo.json is damaged.\n`);
		},
		60_000,
	);
});

test("a server that takes no files, and addresses with secrets, are refused", async () => {
	const server = plainServer({ readOnly: true });
	for (const flag of ["--save", "--save-hf"]) {
		const { exitCode, stderr } = await mimo(train(`--train-iters 1 ${flag} ${server.url}/a`));
		expect([exitCode, stderr]).toEqual([
			1,
			`mimo: ${server.url}/a takes no files: the answer to PUT was 405. Checkpoints go to servers that know it, as WebDAV's do, or to s3://BUCKET/PREFIX.\n`,
		]);
	}
	await server.stop();
	for (const args of [`generate ${answers} --load`, `generate ${answers} --load-hf`, "convert-ckpt inspect"]) {
		const { exitCode, stderr } = await mimo(`${args} http://me:word@127.0.0.1:9/a?key=1`);
		expect([exitCode, stderr]).toEqual([
			1,
			"mimo: http://127.0.0.1:9/a is no address of checkpoints; those are s3://BUCKET/PREFIX and https://HOST/PATH.\n",
		]);
	}
}, 60_000);
