/** Models by their name on Hugging Face's Hub: from the cache, downloaded from a local server, cut, damaged, refused. */
import { afterAll, beforeEach, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { executable } from "../../commands/mimo.ts";
import { golden } from "../../golden.ts";

const model = golden("hybrid-tiny");
const commit = "0123456789abcdef0123456789abcdef01234567";
const folder = mkdtempSync(join(tmpdir(), "mimo-hub-"));

interface Served {
	readonly bytes: Buffer;
	/** Whether it is stored as a large file. */
	readonly large: boolean;
}
const files = new Map<string, Served>(
	["config.json", "model.safetensors"].map((name) => [
		name,
		{ bytes: readFileSync(join(model, name)), large: name.endsWith(".safetensors") },
	]),
);
files.set("pytorch_model.bin", { bytes: Buffer.from("a pickle"), large: true });

const sha = (algorithm: string, ...parts: (string | Buffer)[]) => {
	const hash = createHash(algorithm);
	for (const part of parts) hash.update(part);
	return hash.digest("hex");
};

/** How the server treats the next answers with weights. */
let mischief: ("cut" | "flip" | "whole")[] = [];
let requests: string[] = [];

/** A Hub with one model, which asks for a token. */
const server = Bun.serve({
	port: 0,
	hostname: "127.0.0.1",
	fetch(request) {
		const { pathname } = new URL(request.url);
		requests.push(`${pathname} ${request.headers.get("range") ?? ""}`.trim());
		if (!pathname.includes("owner/model")) return new Response("{}", { status: 404 });
		if (request.headers.get("authorization") !== "Bearer hf_secret") return new Response("{}", { status: 401 });
		if (pathname === "/api/models/owner/model/revision/main") {
			return Response.json({
				_id: "1",
				id: "owner/model",
				sha: commit,
				private: false,
				downloads: 0,
				likes: 0,
				gated: false,
				lastModified: "2026-01-01",
			});
		}
		if (pathname === `/api/models/owner/model/tree/${commit}`) {
			return Response.json(
				[...files].map(([path, { bytes, large }]) => ({
					type: "file",
					path,
					size: bytes.byteLength,
					oid: sha("sha1", `blob ${bytes.byteLength}\0`, bytes),
					...(large ? { lfs: { oid: sha("sha256", bytes), size: bytes.byteLength, pointerSize: 130 } } : {}),
				})),
			);
		}
		const found = files.get(pathname.replace(`/owner/model/resolve/${commit}/`, ""));
		if (found === undefined) return new Response("", { status: 404 });
		const [, first] = /^bytes=(\d+)-$/.exec(request.headers.get("range") ?? "")!;
		const rest = Buffer.from(found.bytes.subarray(Number(first)));
		const kind = found.large ? (mischief.shift() ?? "whole") : "whole";
		if (kind === "flip") rest[rest.length - 1]! ^= 1;
		return new Response(kind === "cut" ? rest.subarray(0, rest.length >> 1) : rest, { status: 206 });
	},
});
afterAll(async () => {
	await server.stop(true);
	rmSync(folder, { recursive: true });
});
beforeEach(() => {
	[mischief, requests] = [[], []];
});

async function inspect(cache: string, environment: Readonly<Record<string, string>> = {}, name = "owner/model") {
	const child = Bun.spawn(
		[executable, "plan", "--load-hf", name, "--global-batch-size", "2", "--seq-length", "32", "--json"],
		{
			cwd: folder,
			env: {
				...process.env,
				HF_HUB_CACHE: join(folder, cache),
				HF_ENDPOINT: server.url.origin,
				HF_TOKEN: "hf_secret",
				...environment,
			},
			stdout: "pipe",
			stderr: "pipe",
		},
	);
	const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
	return { exitCode: child.exitCode, stdout, stderr };
}

const snapshot = (cache: string) => join(folder, cache, "models--owner--model/snapshots", commit);

test("a name is downloaded once, through cuts and wrong bytes, and read from the cache without the Hub", async () => {
	mischief = ["cut", "flip", "cut"];
	const first = await inspect("cache");
	expect([first.exitCode, first.stderr]).toEqual([0, ""]);
	for (const name of ["config.json", "model.safetensors"]) {
		expect(readFileSync(join(snapshot("cache"), name)).equals(files.get(name)!.bytes)).toBeTrue();
	}
	expect(existsSync(join(snapshot("cache"), "pytorch_model.bin"))).toBeFalse();
	const size = files.get("model.safetensors")!.bytes.byteLength;
	const ranges = requests.filter((one) => one.includes("model.safetensors")).map((one) => one.split("=")[1]);
	expect(ranges).toEqual(["0-", `${size >> 1}-`, "0-", `${size >> 1}-`]);
	requests = [];
	const again = await inspect("cache", { HF_HUB_OFFLINE: "1" });
	expect([again.exitCode, again.stdout, requests]).toEqual([0, first.stdout, []]);
}, 60_000);

test("a download that ends is gone on with by the same command", async () => {
	mischief = Array.from({ length: 5 }, () => "cut" as const);
	const failed = await inspect("later");
	expect(failed.exitCode).toBe(1);
	expect(failed.stderr).toMatch(
		/^mimo: owner\/model: model\.safetensors cannot be downloaded: it ended after \d+ of \d+ bytes\. The same command goes on with what is there\.\n$/,
	);
	const blobs = readdirSync(join(folder, "later/models--owner--model/blobs")).filter((name) =>
		name.endsWith(".incomplete"),
	);
	expect(blobs).toHaveLength(1);
	expect((await inspect("later")).exitCode).toBe(0);
	expect(requests.at(-1)).toMatch(/range|bytes=[1-9]\d+-$/);
}, 120_000);

test("what cannot be had is one sentence with the command that fetches it", async () => {
	const advice = (name: string) => `\`hf download ${name}\` fetches it on a machine with a network.\n`;
	const absent = await inspect("none", {}, "owner/absent");
	expect([absent.exitCode, absent.stderr]).toEqual([
		1,
		"mimo: owner/absent is no folder and not in the Hub's cache, and the Hub has no such model; " +
			advice("owner/absent"),
	]);
	const refused = await inspect("none", { HF_TOKEN: "hf_wrong" });
	expect(refused.stderr).toContain(
		"the Hub refuses access (HF_TOKEN holds a token, and some models ask for consent on their page); ",
	);
	const offline = await inspect("none", { HF_HUB_OFFLINE: "1" });
	expect(offline.stderr).toBe(
		`mimo: owner/model is not in the Hub's cache, and HF_HUB_OFFLINE is set; ${advice("owner/model")}`,
	);
	const unreachable = await inspect("none", { HF_ENDPOINT: "http://127.0.0.1:9" });
	expect([unreachable.exitCode, unreachable.stderr]).toEqual([1, expect.stringContaining("the Hub cannot be asked (")]);
	expect(unreachable.stderr).toEndWith(advice("owner/model"));
}, 60_000);

test("a file of keys names a model too, and a folder of that name comes first", async () => {
	writeFileSync(join(folder, "run.yaml"), "load-hf: owner/model\nglobal-batch-size: 2\nseq-length: 32\n");
	const plan = () =>
		Bun.spawnSync([executable, "plan", "--config", "run.yaml", "--json"], {
			cwd: folder,
			env: { ...process.env, HF_HUB_CACHE: join(folder, "cache"), HF_HUB_OFFLINE: "1" },
		});
	expect(plan().exitCode).toBe(0);
	mkdirSync(join(folder, "owner/model"), { recursive: true });
	expect(plan().stderr.toString()).toContain(join(folder, "owner/model"));
});
