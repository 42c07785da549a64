/** dist/mimo train on disjoint grids when something is wrong: the sentence, the exit code, and nothing left behind. */
import { afterAll, afterEach, describe, expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { canMount, mountNamespace } from "../absent.ts";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { caption, type Member, png, Scratch, tar } from "../data/fixtures.ts";
import { type Ended, freePort, Launched, survivors } from "../launch/launched.ts";

const small =
	"--preset nemotron-vlm-tiny --hidden-size 32 --kv-channels 8 --mamba-num-heads 4 --mamba-head-dim 16 --vision-num-layers 1 " +
	`--vision-hidden-size 32 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 --log-interval 1 --lr-warmup-iters 0 ${deviceFlags}`;
const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

let started: Launched[] = [];
function start(args: readonly string[], env: Record<string, string> = {}, wrapper: readonly string[] = []): Launched {
	const launched = Launched.run([...wrapper, executable, "train", ...small.split(" "), ...args], { env });
	started.push(launched);
	return launched;
}

/** After every test: no process lives, and nothing is left in /dev/shm. */
afterEach(async () => {
	const pids = started.flatMap((launched) => [...launched.pids, launched.process.pid]);
	for (const { process } of started) process.kill("SIGKILL");
	await Promise.all(started.map(({ process }) => process.exited));
	started = [];
	expect(await survivors(pids)).toEqual([]);
	expect(readdirSync("/dev/shm").filter((name) => name.startsWith("mimo"))).toEqual([]);
});

describe("a layout that cannot be", () => {
	const cases: readonly [name: string, flags: string, message: string][] = [
		[
			"overlapping grids",
			"--encoder-tp 2 --llm-offset 1",
			"--llm-offset: the value is 1; allowed is encoder-tp × encoder-dp (2), or 0 where both modules have equally many ranks: on rank 1 both modules would run.",
		],
		[
			"a rank that no grid has",
			"--encoder-tp 2 --llm-offset 3",
			"--llm-offset: the value is 3; allowed is encoder-tp × encoder-dp (2), or 0 where both modules have equally many ranks: on rank 2 no module would run.",
		],
		[
			"fewer ranks than the grids have",
			"--encoder-tp 2 --nproc 2",
			"--nproc 2: the configured grids need 3 ranks (radio_encoder 2, language 1).",
		],
		[
			"a batch that language lanes cannot share",
			"--llm-dp 3",
			"--global-batch-size: the value is 8; allowed is a multiple of micro-batch-size × data lanes (6).",
		],
	];
	for (const [name, flags, message] of cases) {
		test(name, () => {
			const { exitCode, stdout, stderr } = mimo(["train", ...small.split(" "), ...flags.split(" ")]);
			expect({ exitCode, stdout, stderr }).toEqual({ exitCode: 2, stdout: "", stderr: `mimo: ${message}\n` });
		});
	}
});

/** Expects of a failed run one diagnosis that matches both patterns, exit code 1, and an end within ten seconds. */
function expectDiagnosis(ended: Ended, first: RegExp, other: RegExp): void {
	expect(ended.stderr).toMatch(first);
	expect(ended.stderr).toMatch(other);
	expect(ended.stderr.match(/^mimo: /gm)).toHaveLength(1);
	expect(ended.exitCode).toBe(1);
	expect(ended.seconds).toBeLessThan(10);
}

const long = ["--encoder-tp", "2", "--llm-dp", "2", "--llm-ep", "2", "--train-iters", "100000"];

describe("a rank that ends too soon", () => {
	test("killed while ranks still meet", async () => {
		const launched = start(long);
		await launched.said(/^rank 3: pid/m);
		launched.signal(launched.pids[1]!, "SIGKILL");
		expectDiagnosis(
			await launched.end(),
			/^mimo: rank 1 \(radio_encoder, tp 1 dp 0.* failed: it was killed by SIGKILL \(before it joined\)\.$/m,
			/^ {2}rank 3 .*(had not joined|before its first collective)\.$/m,
		);
	}, 60_000);

	// The launcher sees a killed rank at once: the others may still be between two collectives.
	const waitedOrBusy =
		/^ {2}rank \d .* (waited in \S+ \w+ \d+ \(\d+ bytes\) for ranks? |was busy, after \S+ \w+ \d+ )/m;
	for (const [rank, module] of [
		[1, "radio_encoder, tp 1 dp 0"],
		[2, "language, tp 0 dp 0 ep 0"],
	] as const) {
		test(`killed in training: rank ${rank} (${module})`, async () => {
			const launched = start(long);
			await launched.said(/ iteration +3\//);
			launched.signal(launched.pids[rank]!, "SIGKILL");
			const first = new RegExp(
				`^mimo: rank ${rank} \\(${module}; host \\S+, process \\d+\\) failed: it was killed by SIGKILL \\(after step \\d+, `,
				"m",
			);
			expectDiagnosis(await launched.end(), first, waitedOrBusy);
		}, 60_000);
	}

	test("stopped in training", async () => {
		const launched = start(long);
		await launched.said(/ iteration +3\//);
		launched.signal(launched.pids[0]!, "SIGSTOP");
		expectDiagnosis(
			await launched.end(),
			/^mimo: rank 0 \(radio_encoder, tp 0 dp 0.* failed: it was stopped \(SIGSTOP or SIGTSTP\) for 5 s/m,
			/^ {2}rank [123] .* for ranks? /m,
		);
	}, 60_000);
});

describe("what a rank refuses", () => {
	test("a number of image tokens that no image has", async () => {
		const flags = "--no-dynamic-resolution --img-h 32 --img-w 32 --image-seq-length 8 --train-iters 1";
		const ended = await start(flags.split(" ")).end();
		expect(ended.stderr).toMatch(
			/^mimo: rank \d .* failed: image-seq-length is 8, but an image of img-h × img-w makes 4 image tokens /,
		);
		expect(ended.exitCode).toBe(1);
	}, 60_000);

	test("a damaged image, by its sample", async () => {
		const members = Array.from({ length: 8 }, (_, i): Member[] => [
			[`s${i}.png`, i === 5 ? png(4, 4, i).subarray(0, 40) : png(4, 4, i)],
			[`s${i}.txt`, caption(i)],
		]);
		scratch.file("damaged/shard-000.tar", tar(members.flat()));
		const path = join(scratch.path, "damaged");
		prepare(path, {
			...defaultPrepareOptions,
			splitRatio: "1,0,0",
			sampleType: "CaptioningSample",
			fieldMap: '{"image": "png", "caption": "txt"}',
		});
		const flags = "--seq-length 64 --train-iters 4 --data-on-error raise --packing-buffer-size 4 --data-end-id 10";
		const ended = await start(["--data-path", path, ...flags.split(" ")]).end();
		expect(ended.stderr).toMatch(
			/^mimo: rank \d .* failed: Sample shard-000\.tar\/s5: the part png cannot be decoded: the image ends too early /,
		);
		expect(ended.exitCode).toBe(1);
	}, 60_000);
});

describe("ranks that a launcher such as torchrun starts", () => {
	const place = (rank: number, port: number) => ({
		RANK: String(rank),
		WORLD_SIZE: "2",
		LOCAL_RANK: String(rank),
		MASTER_ADDR: "127.0.0.1",
		MASTER_PORT: String(port),
	});

	test("refuse another configuration by key and values", async () => {
		const port = await freePort();
		const ranks = [1e-3, 2e-3].map((lr, rank) =>
			start(["--lr", String(lr), "--min-lr", "0", "--train-iters", "1"], place(rank, port)),
		);
		for (const { exitCode, stderr } of await Promise.all(ranks.map((rank) => rank.end()))) {
			expect(stderr).toMatch(
				/^mimo: rank 1 .* has another configuration than rank 0 .*: lr 0\.002 instead of 0\.001\.$/m,
			);
			expect(exitCode).toBe(1);
		}
	}, 60_000);

	test("name a port that is in use", async () => {
		const server = createServer((socket) => socket.on("error", () => {}).end("220 mail\r\n"));
		await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
		const { port } = server.address() as { port: number };
		const { exitCode, stderr } = await start(["--train-iters", "1"], place(0, port)).end();
		server.close();
		expect(stderr).toContain(`Port ${port} of 127.0.0.1, where the ranks should meet, is in use by another program;`);
		expect(exitCode).toBe(1);
	}, 60_000);
});

test.skipIf(!canMount())(
	"a full /dev/shm is named with what is missing",
	async () => {
		const mount = 'mount -t tmpfs -o size=1500k tmpfs /dev/shm && exec "$@"';
		const ended = await start(["--train-iters", "1"], {}, [...mountNamespace, "sh", "-c", mount, "sh"]).end();
		expect(ended.stderr).toMatch(
			/^mimo: rank \d .* failed: \/dev\/shm is full: .+ needs \d+\.\d MB, \d+\.\d MB of 1\.5 MB are free\./m,
		);
		expect(ended.exitCode).toBe(1);
	},
	60_000,
);
