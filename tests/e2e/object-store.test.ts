/** Trainings that save to and go on from an S3 server, through a gate that makes requests fail, and a plain HTTP server. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { defaultRequests } from "../../src/checkpoint/remote/requests.ts";
import { StagedStore } from "../../src/checkpoint/remote/staged-store.ts";
import { StoreServer } from "../checkpoint/remote/store-server.ts";
import { executable } from "../commands/mimo.ts";
import { referencePython } from "../reference/python.ts";
import { CheckpointRuns } from "./checkpoint-runs.ts";

const python = referencePython("moto");
const runs = new CheckpointRuns();
afterAll(() => runs[Symbol.dispose]());
let server: StoreServer;
beforeAll(async () => {
	if (python !== null) server = await StoreServer.start(python);
});
afterAll(async () => await server?.[Symbol.asyncDispose]());

/** Runs `mimo` beside the gate, which is in this process; `environment`: instead of that of the store. */
async function mimo(args: readonly string[], environment = server.environment) {
	const child = Bun.spawn([executable, ...args], {
		cwd: runs.folder,
		env: { PATH: process.env.PATH, HOME: runs.folder, ...environment },
		stdout: "pipe",
		stderr: "pipe",
	});
	const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
	return { exitCode: await child.exited, stdout, stderr };
}

const train = async (more: string) => await mimo(runs.flags("1+1", more));

test.skipIf(python === null)(
	"a run that saves to a store and goes on from it is the uninterrupted one",
	async () => {
		expect((await train("--train-iters 4 --save whole --save-interval 2")).stderr).toBe("");
		server.arm("503 four times", 5);
		const place = "--save s3://bucket/runs/a --keep 1 --staging-dir stage";
		const first = await train(`--train-iters 3 ${place} --save-interval 2 --async-save`);
		expect({ exitCode: first.exitCode, stderr: first.stderr }).toEqual({ exitCode: 0, stderr: "" });
		expect(first.stdout).toContain("Saved the checkpoint of step 3 to s3://bucket/runs/a/iter_0000003 (");
		expect(server.disarm()).toBe(4);
		// Of the checkpoint alone, as the run was configured; on a host that has nothing of it.
		server.arm("truncated", 2);
		const second = await mimo([
			"train",
			"--load",
			"s3://bucket/runs/a",
			"--train-iters",
			"4",
			"--staging-dir",
			"other",
		]);
		expect(second.exitCode).toBe(0);
		expect(second.stdout).toContain("Changed since checkpoint");
		expect(server.disarm()).toBe(1);
		const keys = server.seen.map((line) => line.split(" ")[1]!.split("?")[0]);
		expect(keys).toContain("/bucket/runs/a/iter_0000004/index.json");
		// What was saved is no longer on the host.
		const store = new StagedStore("s3://bucket/runs/a", runs.path("copy"), defaultRequests, server.environment);
		await store.refresh();
		await store.bring("iter_0000004", { part: 0, parts: 1 });
		expect(runs.digests("copy")).toEqual(runs.digests("whole"));
		for (const { stdout, stderr } of [first, second]) expect(stdout + stderr).not.toContain("the-secret");
	},
	120_000,
);

test.each([
	[
		"--save s3://bucket/a",
		"s3://bucket/a needs credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment.",
	],
	["--load s3://", "s3:// is no address of checkpoints; those are s3://BUCKET/PREFIX and https://HOST/PATH."],
	["--save gs://bucket/a", "gs://"],
	["--load http://me:word@127.0.0.1:9/a?key=1", "http://127.0.0.1:9/a is no address of checkpoints"],
	["--save-hf gs://bucket/a", "gs://bucket/a"],
])("%s is refused", async (flags, sentence) => {
	const { exitCode, stdout, stderr } = await mimo(runs.flags("1+1", `--train-iters 1 ${flags}`), {});
	expect(exitCode).not.toBe(0);
	expect(stdout).toBe("");
	expect(stderr).toContain(sentence);
});
