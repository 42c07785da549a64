/**
 * Writing files of a plain HTTP(S) server that knows PUT, as WebDAV servers do (RFC 4918): MKCOL makes folders, MOVE gives a whole file its
 * name.
 */
import { UserError } from "../../system/errors.ts";
import type { Condition, Found, ObjectStore } from "./object-store.ts";
import { failWith, type RequestOptions, retried } from "./requests.ts";
import { encodePath } from "./signature.ts";
import type { Target } from "./store-address.ts";

/** Bytes of the largest file of a server that is read back, unless a larger one was sent. */
const LARGEST_READ = 2 ** 24;

export class PlainFiles {
	constructor(
		private readonly store: ObjectStore,
		private readonly target: Target,
		private readonly options: RequestOptions,
	) {}

	/**
	 * Writes a small file under another name and, once it can be read there as it was sent, moves it to its own, so that no reader finds a
	 * part of it; a server that does not know MOVE gets it under its own name. Such servers keep no condition while they write: it is compared
	 * just before. The file's tag; null: the condition is not met.
	 */
	async replace(key: string, bytes: Uint8Array<ArrayBuffer>, condition: Condition): Promise<string | null> {
		const { store, target } = this;
		const what = `Writing ${store.url}/${key}`;
		const beside = `${key}.tmp-${crypto.randomUUID().slice(0, 8)}`;
		const read = (name: string) => store.get(name, Math.max(LARGEST_READ, 2 * bytes.byteLength));
		const is = (found: Found | null) => found !== null && Buffer.compare(found.bytes, bytes) === 0;
		return await retried(what, this.options, async () => {
			const before = condition === null ? null : await read(key);
			const fits = condition === null || ("etag" in condition ? before?.etag === condition.etag : before === null);
			// The answer to an earlier attempt may be what was lost.
			if (!fits) return is(before) ? before!.etag : null;
			await this.#send(what, beside, bytes);
			if (!is(await read(beside))) throw new Error("it keeps other bytes than were sent");
			const headers = { destination: `${target.origin}${target.base}${encodePath(key)}`, overwrite: "T" };
			const { response, text } = await store.send("MOVE", beside, { headers });
			if ([400, 405, 501, 502].includes(response.status)) {
				await this.#send(what, key, bytes);
				await store.remove(beside);
			} else if (!response.ok && response.status !== 404) failWith(what, response, text);
			const there = await read(key);
			if (!is(there)) throw new Error("it keeps other bytes than were sent");
			return there!.etag;
		});
	}

	/** Writes a file, and compares the size that the server then reports. */
	async upload(key: string, path: string): Promise<void> {
		const what = `Writing ${this.store.url}/${key}`;
		const file = Bun.file(path);
		await retried(what, this.options, async () => {
			await this.#send(what, key, file);
			const bytes = (await this.store.stat(key))?.bytes;
			if (bytes !== file.size) throw new Error(`it keeps ${bytes ?? "none"} of ${file.size} bytes`);
		});
	}

	/** Sends a file, into folders that are made where the server asks for them. */
	async #send(what: string, key: string, body: Uint8Array<ArrayBuffer> | Blob): Promise<void> {
		for (let made = false; ; made = true) {
			const { response, text } = await this.store.send("PUT", key, { body });
			const { status, ok } = response;
			if (ok) return;
			if ([404, 405, 501].includes(status)) {
				throw new UserError(
					`${this.store.url} takes no files: the answer to PUT was ${status}. Checkpoints go to servers that know it, as WebDAV's do, or to s3://BUCKET/PREFIX.`,
				);
			}
			if (status !== 409 || made) failWith(what, response, text);
			const folders = (this.target.base + encodePath(key)).split("/").slice(1, -1);
			// Those that are there already are refused.
			for (let count = 1; count <= folders.length; count++) {
				await this.store.send("MKCOL", null, { path: `/${folders.slice(0, count).join("/")}/` });
			}
		}
	}
}
