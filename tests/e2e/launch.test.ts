/** dist/mimo train on several ranks of this host: it launches itself, and says why when a rank ends. */
import { afterEach, expect, test } from "bun:test";
import { join } from "node:path";
import { executable } from "../commands/mimo.ts";
import { alive, Launched } from "../parallel/launched.ts";

const book = join(import.meta.dir, "../../examples/text/king-james.txt");
const small = ["--preset", "nemotron-tiny", "--data-path", book, "--split", "100,0,0", "--lr-warmup-iters", "1"];

let started: Launched | null = null;
function train(args: readonly string[]): Launched {
	started = new Launched(
		Bun.spawn([executable, "train", ...small, ...args], { stdin: "ignore", stdout: "pipe", stderr: "pipe" }),
	);
	return started;
}
afterEach(async () => {
	const pids = started?.pids ?? [];
	started?.process.kill("SIGKILL");
	for (let i = 0; i < 50 && pids.some(alive); i++) await Bun.sleep(20);
	expect(pids.filter(alive)).toEqual([]);
});

test("starts as many ranks as the grids need, and only the last one reports", async () => {
	const ended = await train(["--llm-tp", "2", "--llm-dp", "2", "--train-iters", "2", "--log-interval", "1"]).end();
	expect(ended).toMatchObject({ exitCode: 0, stderr: "" });
	expect(ended.stdout.match(/^rank \d: pid \d+ \(language, tp \d dp \d\)$/gm)).toHaveLength(4);
	expect(ended.stdout.match(/ iteration +\d\/ +2 \|/g)).toHaveLength(2);
	expect(ended.stdout).not.toContain("[rank ");
}, 120_000);

test("another --nproc is refused with the sizes of the grids", async () => {
	const ended = await train(["--llm-tp", "2", "--nproc", "3", "--train-iters", "2"]).end();
	expect(ended).toMatchObject({
		exitCode: 2,
		stdout: "",
		stderr: "mimo: --nproc 3: the configured grids need 2 ranks (language 2).\n",
	});
}, 120_000);

test("a killed rank ends the training with its name, place and step", async () => {
	const launched = train(["--llm-tp", "2", "--nproc", "2", "--train-iters", "2000", "--log-interval", "1"]);
	await launched.said(/ iteration +3\//);
	launched.signal(launched.pids[0]!, "SIGKILL");
	const ended = await launched.end();
	expect(ended.stderr).toMatch(
		/^mimo: rank 0 \(language, tp 0 dp 0; host \S+, process \d+\) failed: it was killed by SIGKILL \(after step \d+, /,
	);
	expect(ended.stderr).toMatch(
		/^ {2}rank 1 \(language, tp 1 dp 0; .* waited in language\.\w+ \w+ \d+ \(\d+ bytes\) for rank 0\.$/m,
	);
	expect(ended.exitCode).toBe(1);
	expect(ended.seconds).toBeLessThan(10);
}, 120_000);
