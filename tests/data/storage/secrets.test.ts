/** Passwords, tokens and signatures of data's URLs stay out of what a run prints, logs, tracks and saves. */
import { expect, test } from "bun:test";
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { shownConfiguration } from "../../../src/config/print.ts";
import { resolveConfiguration } from "../../../src/config/resolve.ts";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { captions, Scratch } from "../fixtures.ts";
import { LyingServer } from "./lying-server.ts";

/** Files of a folder that hold a text, below it. */
function filesWith(folder: string, text: string): string[] {
	return (readdirSync(folder, { recursive: true }) as string[])
		.filter((name) => statSync(join(folder, name)).isFile())
		.filter((name) => readFileSync(join(folder, name)).includes(text));
}

test("a run's messages, logs, trackers and checkpoints have no password of its data, and the run goes on with another", async () => {
	using scratch = new Scratch();
	const folder = captions(scratch, "served/set", [12, 8]);
	const shard = join(folder, "served/set-000.tar");
	const bytes = readFileSync(shard);
	bytes.fill(0xee, bytes.indexOf("IDAT") + 4, bytes.indexOf("IDAT") + 20);
	writeFileSync(shard, bytes);
	using server = await LyingServer.start(join(scratch.path, "served"));
	const url = (password: string) => `${server.base.replace("//", `//alice:${password}@`)}/locked/set`;
	const small = [
		...["--preset", "nemotron-vlm-tiny", "--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "4"],
		...["--lr-warmup-iters", "1", "--lr-decay-iters", "4", "--data-end-id", "10", "--num-workers", "1"],
		...["--hidden-size", "32", "--mamba-num-heads", "2", "--vision-hidden-size", "32", "--threads", "1"],
		...["--data-cache-folder", "cache", ...deviceFlags.split(" ")],
	];
	const records = [
		...["--log-json", "out/log.jsonl", "--mlflow-dir", "out/mlruns", "--tensorboard-dir", "out/tb"],
		...["--wandb-project", "p", "--wandb-save-dir", "out/wandb", "--save", "out/ck", "--save-interval", "2"],
	];
	const train = (password: string, ...flags: string[]) =>
		mimo(["train", ...small, ...records, "--data-path", url(password), ...flags], scratch.path, {
			WANDB_MODE: "offline",
		});
	const first = train("s3cret1", "--train-iters", "2");
	expect([first.exitCode, first.exitCode === 0 ? "" : first.stderr]).toEqual([0, ""]);
	const second = train("s3cret2", "--train-iters", "4", "--load", "out/ck");
	expect([second.exitCode, second.exitCode === 0 ? "" : second.stderr]).toEqual([0, ""]);
	const refused = train("wrong-s3cret", "--train-iters", "4", "--load", "out/ck");
	expect([refused.exitCode, refused.stderr]).toEqual([
		1,
		`mimo: ${server.base}/locked/set/.nv-meta/.info.json: the server answered 401 Unauthorized.\n`,
	]);
	for (const { stdout, stderr } of [first, second, refused]) expect(stdout + stderr).not.toContain("s3cret");
	expect(filesWith(join(scratch.path, "out"), "s3cret")).toEqual([]);
	// The records name the data otherwise.
	const shown = `${server.base}/locked/set`;
	const named = filesWith(join(scratch.path, "out"), shown).map((name) => name.split("/")[0]);
	expect([...new Set(named)].sort()).toEqual(["ck", "log.jsonl", "mlruns", "wandb"]);
	expect(readFileSync(join(scratch.path, "out/ck/skipped.jsonl"), "utf8")).toContain(`"dataset":"${shown}"`);
	const info = mimo(["data", "info", url("s3cret1")], scratch.path, { XDG_CACHE_HOME: join(scratch.path, "home") });
	expect([info.exitCode, info.stderr, info.stdout.split(":").slice(0, 3).join(":")]).toEqual([0, "", `${shown}`]);
	const printed = mimo(["train", ...small, "--data-path", url("s3cret1"), "--print-config"], scratch.path);
	expect([printed.exitCode, printed.stdout.includes(shown), printed.stdout.includes("s3cret")]).toEqual([
		0,
		true,
		false,
	]);
}, 60_000);

test("a stored configuration is that of the run but for the secrets", () => {
	const flags = ["--preset", "nemotron-tiny", "--vocab-size", "512", "--lr-warmup-iters", "1"];
	const { configuration } = resolveConfiguration([...flags, "--data-path", "https://a:b@host/set?t=1"], {});
	expect(shownConfiguration(configuration)).toEqual({ ...configuration, dataPath: "https://host/set" });
});
