/**
 * Models by their name on Hugging Face's Hub (`nvidia/NVIDIA-Nemotron-Nano-9B-v2`): found in the Hub's local cache, or downloaded
 * into it. The cache has the layout of huggingface_hub: `models--OWNER--NAME/{blobs,refs,snapshots}`.
 */
import { existsSync, mkdirSync, renameSync, rmSync, statSync, symlinkSync } from "node:fs";
import { appendFile, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { dirname, join, relative } from "node:path";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";
import { fileDigest } from "../files.ts";

const revision = "main";
/** Bytes of the longest token, and of the name of a commit. */
const longestWord = 4096;
/** Files of a repository that a model is read from, or that travel with it; weights in other formats are left out. */
export const wanted = /\.(?:safetensors|json|jinja|txt|model|py|md)$|^(?:LICENSE|NOTICE)[^/]*$/;

const settings = () => {
	const home = process.env.HF_HOME ?? join(process.env.XDG_CACHE_HOME ?? join(homedir(), ".cache"), "huggingface");
	const tokenFile = process.env.HF_TOKEN_PATH ?? join(home, "token");
	const token = process.env.HF_TOKEN ?? (existsSync(tokenFile) ? readWholeText(tokenFile, longestWord).trim() : null);
	return {
		cache: process.env.HF_HUB_CACHE ?? join(home, "hub"),
		endpoint: process.env.HF_ENDPOINT ?? null,
		offline: ["1", "true", "yes", "on"].includes((process.env.HF_HUB_OFFLINE ?? "").toLowerCase()),
		token: token === "" ? null : token,
	};
};

/** A model that is named by its name on the Hub and is not in the cache. */
export class HubModelMissing extends UserError {
	constructor(readonly model: string) {
		super(`${model} is no folder, and no model of that name is in ${settings().cache}; ${fetchAdvice(model)}.`);
	}
}

const fetchAdvice = (model: string) => `\`hf download ${model}\` fetches it on a machine with a network`;

function repository(model: string): string {
	return join(settings().cache, `models--${model.replace("/", "--")}`);
}

/**
 * The folder that a path or a name on the Hub stands for: a path that exists, or that is no such name, itself. Throws HubModelMissing
 * for a name that is not in the cache.
 */
export function hubFolder(path: string): string {
	if (!/^\w[\w.-]*\/\w[\w.-]*$/.test(path) || existsSync(path)) return path;
	const root = repository(path);
	const ref = join(root, "refs", revision);
	if (!existsSync(ref)) throw new HubModelMissing(path);
	return join(root, "snapshots", readWholeText(ref, longestWord).trim());
}

/** Whether the cache has a model of that name. */
export const isInHub = (name: string): boolean => existsSync(join(repository(name), "refs", revision));

interface HubFile {
	readonly path: string;
	readonly size: number;
	/** SHA-256 of a large file, else the SHA-1 of its git blob. */
	readonly digest: string;
	readonly algorithm: "sha256" | "sha1";
}

/**
 * Downloads a model into the cache: a file that was cut goes on where it ended, each is compared with its digest, and the model
 * is named in the cache after its last file. `progress` hears of bytes. Throws a UserError that names the file.
 */
export async function downloadModel(
	model: string,
	progress: (event: { readonly total: number; readonly done: number; readonly file: string }) => void,
): Promise<void> {
	const { endpoint, offline, token } = settings();
	if (offline)
		throw new UserError(`${model} is not in the Hub's cache, and HF_HUB_OFFLINE is set; ${fetchAdvice(model)}.`);
	const root = repository(model);
	const hub = endpoint ?? (await import("@huggingface/hub")).HUB_URL;
	const { commit, files } = await listFiles(model, hub, token);
	const total = files.reduce((sum, { size }) => sum + size, 0);
	let done = 0;
	for (const file of files) {
		const blob = join(root, "blobs", file.digest);
		if (!existsSync(blob)) {
			const url = `${hub}/${model}/resolve/${commit}/${file.path.split("/").map(encodeURIComponent).join("/")}`;
			await fetchFile(`${model}: ${file.path}`, url, token, file, blob, (bytes) => {
				progress({ total, done: done + bytes, file: file.path });
			});
		}
		done += file.size;
		const link = join(root, "snapshots", commit, file.path);
		mkdirSync(dirname(link), { recursive: true });
		rmSync(link, { force: true });
		symlinkSync(relative(dirname(link), blob), link);
	}
	mkdirSync(join(root, "refs"), { recursive: true });
	await writeFile(join(root, "refs", revision), commit);
}

async function listFiles(model: string, hubUrl: string, token: string | null) {
	const { listFiles: list, modelInfo } = await import("@huggingface/hub");
	const access = { hubUrl, ...(token === null ? {} : { accessToken: token }) };
	try {
		const { sha: commit } = await modelInfo({ name: model, revision, additionalFields: ["sha"], ...access });
		const files: HubFile[] = [];
		for await (const { type, path, size, oid, lfs } of list({
			repo: model,
			recursive: true,
			revision: commit,
			...access,
		})) {
			if (type !== "file" || !wanted.test(path) || path.split("/").includes("..")) continue;
			const [digest, algorithm] = lfs ? ([lfs.oid, "sha256"] as const) : ([oid ?? "", "sha1"] as const);
			if (/^[\da-f]{40,64}$/.test(digest)) files.push({ path, size: lfs?.size ?? size, digest, algorithm });
		}
		return { commit, files };
	} catch (error) {
		const status = (error as { statusCode?: number }).statusCode;
		const reason =
			status === 401 || status === 403
				? "the Hub refuses access (HF_TOKEN holds a token, and some models ask for consent on their page)"
				: status === 404
					? "the Hub has no such model"
					: `the Hub cannot be asked (${(error as Error).message})`;
		throw new UserError(`${model} is no folder and not in the Hub's cache, and ${reason}; ${fetchAdvice(model)}.`);
	}
}

/** Fetches one file into `blob`, beginning behind what an earlier try left. Tries five times. */
async function fetchFile(
	name: string,
	url: string,
	token: string | null,
	file: HubFile,
	blob: string,
	onBytes: (done: number) => void,
): Promise<void> {
	const part = `${blob}.incomplete`;
	mkdirSync(dirname(blob), { recursive: true });
	let failure = "";
	for (let attempt = 0; attempt < 5; attempt++) {
		if (attempt > 0) await Bun.sleep(500 * 2 ** attempt);
		let have = existsSync(part) ? statSync(part).size : 0;
		try {
			if (have < file.size) {
				const headers = { ...(token === null ? {} : { authorization: `Bearer ${token}` }), range: `bytes=${have}-` };
				const response = await fetch(url, { headers });
				if (!response.ok) throw new Error(`status ${response.status}`);
				if (response.status === 200) have = 0;
				if (have === 0) await writeFile(part, "");
				for await (const piece of response.body!) {
					await appendFile(part, piece);
					have += piece.byteLength;
					onBytes(have);
				}
			}
			if (have === file.size && blobDigest(part, file) === file.digest) {
				renameSync(part, blob);
				return;
			}
			// A cut answer goes on with the next try; a wrong one begins anew.
			failure = have < file.size ? `it ended after ${have} of ${file.size} bytes` : "its digest is another";
			if (have >= file.size) rmSync(part);
		} catch (error) {
			failure = (error as Error).message;
		}
	}
	throw new UserError(`${name} cannot be downloaded: ${failure}. The same command goes on with what is there.`);
}

const blobDigest = (path: string, { algorithm, size }: HubFile) =>
	fileDigest(path, algorithm, algorithm === "sha1" ? `blob ${size}\0` : "");
