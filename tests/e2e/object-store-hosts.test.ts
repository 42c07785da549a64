/** Trainings of two hosts without a common disk that save to an S3 server and are killed: 20 times under --full. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { basename } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
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

/** Runs that are killed. */
const kills = process.env.MIMO_TEST_FULL ? 20 : 1;

function childrenOf(pid: number): number[] {
	const found = Bun.spawnSync(["pgrep", "-P", String(pid)])
		.stdout.toString()
		.trim();
	return found === "" ? [] : found.split("\n").map(Number);
}

test.skipIf(python === null)(
	"hosts without a common disk save together, are killed while they save, and go on from the newest whole checkpoint",
	async () => {
		const url = "s3://bucket/runs/hosts";
		const start = (more: string) => {
			using free = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
			const { port } = free;
			free.stop(true);
			const flags = `--train-iters 4000 --save ${url} --load ${url} --save-interval 1 --keep 2 ${more}`;
			return ["0", "1"].map((index) => {
				const own = { NNODES: "2", NPROC_PER_NODE: "1", MASTER_ADDR: "127.0.0.1", MASTER_PORT: String(port) };
				const cache = { JOB_COMPLETION_INDEX: index, XDG_CACHE_HOME: runs.path(`host-${index}`) };
				return Bun.spawn([executable, ...runs.flags("1+1", flags)], {
					cwd: runs.folder,
					env: { PATH: process.env.PATH, HOME: runs.folder, ...server.environment, ...own, ...cache },
					stdio: ["ignore", "pipe", "pipe"],
				});
			});
		};
		const newest = async () => {
			const store = new StagedStore(url, runs.path(`look-${crypto.randomUUID()}`), defaultRequests, server.environment);
			await store.refresh();
			using index = NativeCheckpoint.openExactly(store.folder);
			await store.bring(basename(index.path), { part: 0, parts: 1 });
			using checkpoint = NativeCheckpoint.openExactly(store.folder);
			checkpoint.verify();
			return checkpoint.manifest.iteration!;
		};
		let before = 0;
		for (let kill = 0; kill < kills; kill++) {
			const hosts = start("--async-save");
			// In the middle of some save after the first of this run.
			const at = server.requests + 60 + 7 * (kill % 8);
			while (server.requests < at && hosts.every(({ exitCode }) => exitCode === null)) await Bun.sleep(5);
			expect(hosts.map(({ exitCode }) => exitCode)).toEqual([null, null]);
			for (const host of hosts) {
				for (const rank of childrenOf(host.pid)) process.kill(rank, "SIGKILL");
				host.kill("SIGKILL");
			}
			await Promise.all(hosts.map(({ exited }) => exited));
			const found = await newest();
			expect(found).toBeGreaterThan(before);
			before = found;
		}
		const hosts = start(`--exit-interval ${before + 1}`);
		const said = await Promise.all(hosts.map(async ({ stdout }) => await new Response(stdout).text()));
		expect(await Promise.all(hosts.map(({ exited }) => exited))).toEqual([0, 0]);
		expect(said.join("")).toContain(`going on after step ${before}.`);
		expect(await newest()).toBe(before + 1);
	},
	kills * 60_000 + 60_000,
);
