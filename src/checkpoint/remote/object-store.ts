/**
 * Objects below a URL: of an S3-compatible store (s3://BUCKET/PREFIX), or files of a plain HTTP(S) server, which takes them where it
 * knows PUT, as WebDAV servers do. Large objects of S3 go up in parts, each repeated on its own; downloads go on where they were cut.
 */
import {
	closeSync,
	ftruncateSync,
	mkdirSync,
	openSync,
	readSync,
	renameSync,
	rmSync,
	statSync,
	writeSync,
} from "node:fs";
import { dirname } from "node:path";
import { UserError } from "../../system/errors.ts";
import { fileError } from "../../system/system-errors.ts";
import { PlainFiles } from "./plain-files.ts";
import { ask, defaultRequests, failWith, piecesOf, type RequestOptions, retried } from "./requests.ts";
import { encodePath, encodeQuery, signedHeaders } from "./signature.ts";
import { type Environment, type Target, targetOf } from "./store-address.ts";

/** An object of a listing. */
export interface StoredObject {
	/** Below the store's URL. */
	readonly key: string;
	readonly bytes: number;
	readonly etag: string;
	/** Milliseconds since 1970, by the store's clock. */
	readonly modified: number;
}

/** The condition of a write: the object is absent (`absent`), has that version, or may be anything (null). */
export type Condition = { readonly absent: true } | { readonly etag: string } | null;

interface Answer {
	readonly response: Response;
	readonly bytes: Uint8Array;
	readonly text: string;
}

/** Bytes of the largest answer that is kept in memory, unless a caller allows more: a page of a listing has about a megabyte. */
const LARGEST_ANSWER = 2 ** 24;
/** Attempts to bring bytes that have their checksums. */
export const BRINGS = 3;
/** Files on their way at once. */
export const FILES_AT_ONCE = 4;
/** S3's limit of parts. */
const MOST_PARTS = 10_000;

/** Calls `work` on every item, at most `most` at once. */
export async function inParallel<Item>(
	items: readonly Item[],
	most: number,
	work: (item: Item) => Promise<void>,
): Promise<void> {
	const rest = items[Symbol.iterator]();
	await Promise.all(
		Array.from({ length: Math.min(most, items.length) }, async () => {
			for (const item of rest) await work(item);
		}),
	);
}

const entities: Readonly<Record<string, string>> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'" };

/** The text of an element of XML that S3 sends; "" without one. */
function element(xml: string, name: string): string {
	const [, text = ""] = new RegExp(`<${name}>([^<]*)</${name}>`).exec(xml) ?? [];
	return text.replace(/&(#x?)?(\w+);/g, (whole, kind: string | undefined, word: string) =>
		kind === undefined
			? (entities[word] ?? whole)
			: String.fromCodePoint(Number.parseInt(word, kind === "#x" ? 16 : 10)),
	);
}

export class ObjectStore {
	readonly #target: Target;
	/** null: an S3-compatible store. */
	readonly #plain: PlainFiles | null;

	constructor(
		/** Without a slash at its end. */
		readonly url: string,
		private readonly options: RequestOptions = defaultRequests,
		environment: Environment = process.env,
	) {
		this.#target = targetOf(url, environment);
		this.#plain = this.#target.credentials === null ? new PlainFiles(this, this.#target, options) : null;
	}

	/** Whether it is an S3-compatible store, whose objects can be listed; files of a plain server are asked for by name. */
	get listable(): boolean {
		return this.#plain === null;
	}

	/** All objects whose keys begin with `prefix`; a plain server lists nothing: those of the keys `known` that it has. */
	async list(prefix = "", known: readonly string[] = []): Promise<StoredObject[]> {
		const found: StoredObject[] = [];
		if (!this.listable) {
			await inParallel([...new Set(known)], FILES_AT_ONCE, async (key) => {
				const there = await this.stat(key);
				if (there !== null) found.push({ key, ...there, modified: 0 });
			});
			return found;
		}
		for (let token: string | null = ""; token !== null; ) {
			const page: string = await this.#page({
				"list-type": "2",
				prefix: this.#target.prefix + prefix,
				...(token === "" ? {} : { "continuation-token": token }),
			});
			for (const [, entry] of page.matchAll(/<Contents>([\s\S]*?)<\/Contents>/g)) {
				found.push({
					key: element(entry!, "Key").slice(this.#target.prefix.length),
					bytes: Number(element(entry!, "Size")),
					etag: element(entry!, "ETag"),
					modified: Date.parse(element(entry!, "LastModified")),
				});
			}
			token = element(page, "IsTruncated") === "true" ? element(page, "NextContinuationToken") : null;
		}
		return found;
	}

	async #page(query: Readonly<Record<string, string>>): Promise<string> {
		const what = `Listing ${this.url}`;
		return await retried(what, this.options, async () => {
			const { response, text } = await this.send("GET", null, { query });
			if (!response.ok) failWith(what, response, text);
			// A listing that was cut or damaged on its way counts as none.
			if (!/<\/ListBucketResult>\s*$|<\/ListMultipartUploadsResult>\s*$/.test(text))
				throw new Error("it sent half a listing");
			return text;
		});
	}

	/** Reads a small object with its tag; null: the store does not have it. */
	async get(key: string, limit = LARGEST_ANSWER): Promise<Found | null> {
		const what = `Reading ${this.url}/${key}`;
		return await retried(what, this.options, async () => {
			const { response, bytes, text } = await this.send("GET", key, { limit });
			if (response.status === 404 && element(text, "Code") !== "NoSuchBucket") return null;
			if (response.status !== 200) failWith(what, response, text);
			return { bytes, etag: response.headers.get("etag") ?? "" };
		});
	}

	/** Size and tag of an object, without its bytes; null: the store does not have it. */
	async stat(key: string): Promise<Pick<StoredObject, "bytes" | "etag"> | null> {
		const what = `Reading ${this.url}/${key}`;
		return await retried(what, this.options, async () => {
			const { status, headers, ok } = await this.#ask("HEAD", key);
			if (status === 404) return null;
			const length = headers.get("content-length");
			if (!ok) failWith(what, { status, headers } as Response, "");
			if (length === null) throw new Error("it did not say how large the object is");
			return { bytes: Number(length), etag: headers.get("etag") ?? "" };
		});
	}

	/** Writes a small object; its tag, or null: the condition is not met, and nothing was written. */
	async put(key: string, bytes: Uint8Array<ArrayBuffer>, condition: Condition = null): Promise<string | null> {
		if (this.#plain !== null) return await this.#plain.replace(key, bytes, condition);
		const what = `Writing ${this.url}/${key}`;
		let conditional = condition !== null;
		return await retried(what, this.options, async () => {
			const header: Record<string, string> =
				condition === null || !conditional
					? {}
					: "etag" in condition
						? { "if-match": condition.etag }
						: { "if-none-match": "*" };
			const { response, text } = await this.send("PUT", key, { body: bytes, headers: header });
			if (response.ok) return response.headers.get("etag") ?? "";
			if (response.status === 501 && conditional) {
				// A store without conditional writes.
				conditional = false;
				throw new Error("it has no conditional writes");
			}
			if (response.status !== 412 && !(response.status === 404 && condition !== null)) failWith(what, response, text);
			// The answer to an earlier attempt, which fetch itself may have repeated, may be what was lost.
			const there = await this.get(key);
			return there !== null && Buffer.compare(there.bytes, bytes) === 0 ? there.etag : null;
		});
	}

	async remove(key: string): Promise<void> {
		const what = `Removing ${this.url}/${key}`;
		await retried(what, this.options, async () => {
			const { response, text } = await this.send("DELETE", key);
			if (!response.ok && response.status !== 404) failWith(what, response, text);
		});
	}

	/** Writes a file as an object: in parts where it is large. */
	async upload(key: string, path: string): Promise<void> {
		if (this.#plain !== null) return await this.#plain.upload(key, path);
		const { size } = statSync(path);
		const partBytes = Math.max(this.options.partBytes, Math.ceil(size / MOST_PARTS));
		const fd = openSync(path, "r");
		try {
			if (size <= partBytes) await this.put(key, readRange(fd, path, 0, size));
			// Parts that the store no longer knows, or knows otherwise, are sent once more.
			else if (
				!(await this.#uploadParts(key, fd, path, size, partBytes)) &&
				!(await this.#uploadParts(key, fd, path, size, partBytes))
			) {
				throw new UserError(`Writing ${this.url}/${key} failed: the store has lost the parts of two uploads.`);
			}
		} finally {
			closeSync(fd);
		}
	}

	/** False: the store does not know the upload or its parts any more. */
	async #uploadParts(key: string, fd: number, path: string, size: number, partBytes: number): Promise<boolean> {
		const what = `Writing ${this.url}/${key}`;
		const uploadId = await retried(what, this.options, async () => {
			const { response, text } = await this.send("POST", key, { query: { uploads: "" } });
			const id = element(text, "UploadId");
			if (!response.ok) failWith(what, response, text);
			if (id === "") throw new Error("it named no upload");
			return id;
		});
		try {
			const tags: string[] = [];
			let known = true;
			const numbers = Array.from({ length: Math.ceil(size / partBytes) }, (_, index) => index + 1);
			await inParallel(numbers, this.options.parallelParts, async (number) => {
				const begin = (number - 1) * partBytes;
				const body = readRange(fd, path, begin, Math.min(partBytes, size - begin));
				tags[number - 1] = await retried(what, this.options, async () => {
					const query = { partNumber: String(number), uploadId };
					const { response, text } = await this.send("PUT", key, { query, body });
					const tag = response.headers.get("etag");
					if (element(text, "Code") === "NoSuchUpload") {
						known = false;
						return "";
					}
					if (!response.ok) failWith(what, response, text);
					if (tag === null) throw new Error("it sent no tag of the part");
					return tag;
				});
			});
			return known && (await this.#complete(key, uploadId, tags, size));
		} catch (error) {
			await this.#abort(key, uploadId);
			throw error;
		}
	}

	async #complete(key: string, uploadId: string, tags: readonly string[], size: number): Promise<boolean> {
		const what = `Writing ${this.url}/${key}`;
		const parts = tags.map((tag, index) => `<Part><PartNumber>${index + 1}</PartNumber><ETag>${tag}</ETag></Part>`);
		const body = new TextEncoder().encode(`<CompleteMultipartUpload>${parts.join("")}</CompleteMultipartUpload>`);
		return await retried(what, this.options, async () => {
			const { response, text } = await this.send("POST", key, { query: { uploadId }, body });
			// A failure may come after the status was sent.
			if (response.ok && text.includes("<CompleteMultipartUploadResult")) return true;
			const code = element(text, "Code");
			if (code === "NoSuchUpload" || code === "InvalidPart") {
				// The answer to an earlier attempt may be what was lost.
				return (await this.list(key)).some((object) => object.key === key && object.bytes === size);
			}
			if (response.ok) throw new Error(`the answer was ${code === "" ? "no result" : code}`);
			return failWith(what, response, text);
		});
	}

	async #abort(key: string, uploadId: string): Promise<void> {
		await this.send("DELETE", key, { query: { uploadId } }).catch(() => {});
	}

	/** Ends uploads that began before a time, by the store's clock, and that nothing will finish. */
	async abortUploads(before: number): Promise<void> {
		const page = await this.#page({ uploads: "", prefix: this.#target.prefix });
		for (const [, entry] of page.matchAll(/<Upload>([\s\S]*?)<\/Upload>/g)) {
			if (Date.parse(element(entry!, "Initiated")) >= before) continue;
			await this.#abort(element(entry!, "Key").slice(this.#target.prefix.length), element(entry!, "UploadId"));
		}
	}

	/** Brings an object of `bytes` bytes to the file `partial`: what is there of it, from an earlier process even, is not brought again. */
	async #download(key: string, bytes: number, partial: string): Promise<void> {
		const what = `Reading ${this.url}/${key}`;
		let fd: number;
		try {
			fd = openSync(partial, "a+");
		} catch (error) {
			throw fileError("create", partial, error);
		}
		try {
			let position = statSync(partial).size;
			let before = position;
			const restart = () => {
				ftruncateSync(fd, 0);
				position = 0;
			};
			if (position > bytes) restart();
			const attempt = async () => {
				before = position;
				if (position === bytes) return;
				const response = await this.#ask("GET", key, { headers: { range: `bytes=${position}-${bytes - 1}` } });
				if (response.status !== 206 && response.status !== 200) {
					const { text } = await this.#answer(response, LARGEST_ANSWER);
					if (response.status === 404) throw new UserError(`${this.url} is torn: ${key} is missing.`);
					failWith(what, response, text);
				}
				const [, begin] = /^bytes (\d+)-/.exec(response.headers.get("content-range") ?? "") ?? [];
				if (response.status === 200) restart();
				else if (Number(begin) !== position) throw new Error("it sent other bytes than were asked for");
				for await (const piece of piecesOf(response, this.options)) {
					if (position + piece.length > bytes)
						throw new UserError(`${this.url} is torn: ${key} has more than ${bytes} bytes.`);
					for (let done = 0; done < piece.length; ) done += writeSync(fd, piece, done);
					position += piece.length;
				}
				if (position < bytes) throw new Error(`it sent ${position} of ${bytes} bytes`);
			};
			await retried(what, this.options, attempt, () => position > before);
		} finally {
			closeSync(fd);
		}
	}

	/**
	 * Brings an object of `bytes` bytes to a file, unless it is there already; once more, a few times, where `damage` finds some in a file. A
	 * file has its name once it is whole. `part`: of several processes that may bring it, which this is.
	 */
	async bring(
		key: string,
		path: string,
		bytes: number,
		{ part, damage }: { readonly part: number; readonly damage: (path: string) => string | null },
	): Promise<void> {
		mkdirSync(dirname(path), { recursive: true });
		const partial = `${path}.part-${part}`;
		for (let [attempt, there] = [0, path]; ; attempt++) {
			if (statSync(there, { throwIfNoEntry: false })?.size === bytes) {
				const found = damage(there);
				if (found === null) return there === path ? undefined : renameSync(there, path);
				rmSync(there);
				if (attempt >= BRINGS) throw new UserError(`${this.url}/${key} is damaged: ${found}.`);
			}
			await this.#download(key, bytes, partial);
			there = partial;
		}
	}

	/** One request, and its whole answer. `key` null: the bucket itself. */
	async send(method: string, key: string | null, request: Request = {}): Promise<Answer> {
		return await this.#answer(await this.#ask(method, key, request), request.limit ?? LARGEST_ANSWER);
	}

	async #answer(response: Response, limit: number): Promise<Answer> {
		const pieces: Uint8Array[] = [];
		let total = 0;
		for await (const piece of piecesOf(response, this.options)) {
			pieces.push(piece);
			total += piece.length;
			if (total > limit) throw new UserError(`${this.url} answers with more than ${limit} bytes.`);
		}
		const announced = response.headers.get("content-length");
		if (announced !== null && Number(announced) !== total) throw new Error(`it sent ${total} of ${announced} bytes`);
		const bytes = Buffer.concat(pieces);
		return { response, bytes, text: bytes.subarray(0, LARGEST_ANSWER).toString("utf8") };
	}

	async #ask(method: string, key: string | null, request: Request = {}): Promise<Response> {
		const { query = {}, body, headers = {} } = request;
		const { origin, base, root, credentials } = this.#target;
		const path = request.path ?? (key === null ? root : base + encodePath(key));
		const signed = { method, origin, path, query, body: (body as Uint8Array | undefined) ?? new Uint8Array(0) };
		const signature = credentials === null ? {} : signedHeaders(signed, credentials, { signed: headers });
		const parameters = encodeQuery(query);
		const url = `${origin}${path}${parameters === "" ? "" : `?${parameters}`}`;
		const all = { "accept-encoding": "identity", ...headers, ...signature };
		return await ask(url, { method, headers: all, ...(body === undefined ? {} : { body }) }, this.options);
	}
}

export interface Found {
	readonly bytes: Uint8Array;
	readonly etag: string;
}

interface Request {
	/** In the place of the key's. */
	readonly path?: string;
	readonly query?: Readonly<Record<string, string>>;
	/** A Blob goes to plain servers alone: it is not signed. */
	readonly body?: Uint8Array<ArrayBuffer> | Blob;
	readonly headers?: Readonly<Record<string, string>>;
	/** Bytes of the largest answer. */
	readonly limit?: number;
}

function readRange(fd: number, path: string, begin: number, length: number): Uint8Array<ArrayBuffer> {
	const bytes = new Uint8Array(length);
	for (let done = 0; done < length; ) {
		const count = readSync(fd, bytes, done, length - done, begin + done);
		if (count === 0) throw new UserError(`${path} became shorter while it was read.`);
		done += count;
	}
	return bytes;
}
