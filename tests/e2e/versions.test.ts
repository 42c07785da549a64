/** Ranks of two builds: dist/mimo and a copy of it that says it is of another commit. */
import { afterAll, expect, test } from "bun:test";
import { chmodSync, copyFileSync, mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { executable, mimo } from "../commands/mimo.ts";
import { Launched } from "../launch/launched.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-versions-"));
const started: Launched[] = [];
afterAll(() => {
	for (const { process } of started) process.kill("SIGKILL");
	rmSync(folder, { recursive: true });
});

const flags =
	"train --preset nemotron-vlm-tiny --hidden-size 32 --kv-channels 8 --mamba-num-heads 4 --mamba-head-dim 16 " +
	"--vision-num-layers 1 --vision-hidden-size 32 --seq-length 32 --train-iters 2 --lr-warmup-iters 0 --device cpu";

/** "0.1.0 (commit 0123456789ab)". */
const version = /^mimo (\S+ \(commit [^)]+\))/.exec(mimo(["--version"]).stdout)![1]!;
const otherVersion = version.replace(/commit [^)]+/, (text) => `commit ${"f".repeat(text.length - "commit ".length)}`);

/** dist/mimo with another commit in it, of equal length. */
function otherBuild(): string {
	const [own, other] = [version, otherVersion].map((text) => /commit ([^)]+)/.exec(text)![1]!) as [string, string];
	const bytes = readFileSync(executable);
	for (let at = bytes.indexOf(own); at >= 0; at = bytes.indexOf(own, at + 1)) bytes.write(other, at, "latin1");
	const path = join(folder, "other");
	writeFileSync(path, bytes);
	chmodSync(path, 0o755);
	return path;
}

function start(program: string, env: Record<string, string> = {}): Launched {
	const launched = Launched.run([program, ...flags.split(" ")], { env });
	started.push(launched);
	return launched;
}

const sentence = (one: string, other: string) =>
	new RegExp(`^mimo: ${one} runs mimo ${RegExp.escape(otherVersion)}, ${other} runs ${RegExp.escape(version)}\\.\n$`);
const rank = (number: number) => `rank ${number} \\(host \\S+, process \\d+\\)`;

test("a rank of another build is refused, and everybody says so in one sentence", async () => {
	const other = otherBuild();
	expect(Bun.spawnSync([other, "--version"]).stdout.toString()).toStartWith(`mimo ${otherVersion}`);
	using probe = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
	const { port } = probe;
	probe.stop();
	const place = (number: number) => ({
		...{ RANK: String(number), WORLD_SIZE: "2", LOCAL_RANK: String(number) },
		...{ MASTER_ADDR: "127.0.0.1", MASTER_PORT: String(port) },
	});
	const ended = await Promise.all([start(executable, place(0)), start(other, place(1))].map((one) => one.end()));
	for (const { exitCode, stdout, stderr } of ended) {
		expect(stderr).toMatch(sentence(rank(1), rank(0)));
		expect([exitCode, stdout]).toEqual([1, ""]);
	}
}, 60_000);

test("a launcher whose program is replaced before its ranks start still starts its own", async () => {
	const program = join(folder, "mimo");
	copyFileSync(executable, program);
	const other = otherBuild();
	const launched = start(program);
	renameSync(other, program);
	const { exitCode, stdout, stderr } = await launched.end();
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toMatch(/^Trained 2 steps in /m);
}, 60_000);
