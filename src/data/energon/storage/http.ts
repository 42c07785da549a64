/** Reads byte ranges over HTTP(S) and from S3-compatible stores, with retries; Bun's client signs the URLs of S3. */
import { S3Client } from "bun";
import type { RemoteOptions, RemoteVersion } from "./remote-options.ts";

/** A permanent failure, which is not retried; `missing`: the file does not exist. */
export class RemoteError extends Error {
	constructor(
		sentence: string,
		readonly missing = false,
	) {
		super(sentence);
	}
}

/** Number of attempts, and the pauses and time limits of requests. */
export type RequestOptions = Pick<RemoteOptions, "attempts" | "backoffMilliseconds" | "stallMilliseconds">;

/** Bytes of the largest file that a server may announce. */
export const LARGEST_FILE = 2 ** 46;

/** Size and tag of a file. Throws a RemoteError. */
export async function statRemote(
	url: string,
	options: RequestOptions,
): Promise<{ readonly size: number; readonly etag: string | null }> {
	return await retried(url, options, async () => {
		const response = await request(url, 0, 1, options);
		const etag = tagOf(response.headers);
		try {
			return { size: response.status === 416 ? 0 : sizeOf(url, response.headers, 0, 1), etag };
		} finally {
			await response.body?.cancel().catch(() => {});
		}
	});
}

/** Bytes [offset, offset + length) of a version of a file. Throws a RemoteError. */
export async function readRemote(
	{ url, size, etag }: Omit<RemoteVersion, "cacheName">,
	offset: number,
	length: number,
	options: RequestOptions,
): Promise<Uint8Array> {
	return await retried(url, options, async () => {
		const response = await request(url, offset, length, options);
		try {
			const found = tagOf(response.headers);
			if (etag !== null && found !== null && found !== etag) {
				throw new RemoteError(`${url} changed while it was read: its tag was ${etag} and is ${found}.`);
			}
			const now = response.status === 416 ? 0 : sizeOf(url, response.headers, offset, length);
			if (now !== size) throw new RemoteError(`${url} changed while it was read: it had ${size} bytes and has ${now}.`);
			return await bodyOf(url, response, length, options.stallMilliseconds);
		} finally {
			await response.body?.cancel().catch(() => {});
		}
	});
}

function tagOf(headers: Headers): string | null {
	return headers.get("etag") ?? headers.get("last-modified");
}

/**
 * Size of the whole file in the answer to a request for [offset, offset + length). Throws a RemoteError if the answer is for
 * another range, or has an invalid size.
 */
export function sizeOf(url: string, headers: Headers, offset: number, length: number): number {
	const range = headers.get("content-range");
	const [, first, last, total] = /^bytes (\d{1,16})-(\d{1,16})\/(\d{1,16})$/.exec(range ?? "") ?? [];
	if (total === undefined) {
		throw new RemoteError(`${url}: the server does not say how large the file is (Content-Range: ${brief(range)}).`);
	}
	const size = Number(total);
	if (size > LARGEST_FILE) {
		throw new RemoteError(`${url}: the server says that the file has ${total} bytes, more than any file may have.`);
	}
	if (size <= offset || Number(first) !== offset || Number(last) !== Math.min(offset + length, size) - 1) {
		const asked = `${offset}-${offset + length - 1}`;
		throw new RemoteError(`${url}: the request was for bytes ${asked}, and the answer has ${brief(range)}.`);
	}
	return size;
}

/** A header's value for a message. */
function brief(value: string | null): string {
	return value === null ? "missing" : JSON.stringify(value.slice(0, 80));
}

/**
 * The `length` bytes of a body, which may not be longer. A pause of more than `stall` milliseconds between two pieces is a
 * failure.
 */
async function bodyOf(url: string, response: Response, length: number, stall: number): Promise<Uint8Array> {
	const bytes = new Uint8Array(length);
	let filled = 0;
	if (response.body === null) throw new Error("it sent no bytes");
	const reader = response.body.getReader();
	try {
		for (;;) {
			const late = Promise.withResolvers<never>();
			const timer = setTimeout(() => late.reject(new Error(`it sent nothing for ${stall / 1000} s`)), stall);
			try {
				const { done, value } = await Promise.race([reader.read(), late.promise]);
				if (done) break;
				if (filled + value.length > length) {
					throw new RemoteError(`${url}: the server sends more than the ${length} requested bytes.`);
				}
				bytes.set(value, filled);
				filled += value.length;
			} finally {
				clearTimeout(timer);
			}
		}
	} finally {
		await reader.cancel().catch(() => {});
		reader.releaseLock();
	}
	if (filled !== length) throw new Error(`it sent ${filled} of ${length} bytes`);
	return bytes;
}

async function request(url: string, offset: number, length: number, options: RequestOptions): Promise<Response> {
	const response = await fetch(address(url), {
		// Ranges of compressed answers differ, and they could inflate to any size.
		headers: { Range: `bytes=${offset}-${offset + length - 1}`, "Accept-Encoding": "identity" },
		decompress: false,
		signal: AbortSignal.timeout(options.stallMilliseconds * 4),
	});
	const { status } = response;
	const encoding = response.headers.get("content-encoding") ?? "identity";
	const answers = status === 206 || (status === 416 && offset === 0);
	if (answers && encoding === "identity") return response;
	await response.body?.cancel();
	if (answers) {
		throw new RemoteError(
			`${url}: the server compresses its answers (${brief(encoding)}) although the request forbids it.`,
		);
	}
	if (status === 404) throw new RemoteError(`${url} does not exist.`, true);
	if (status === 200) throw new RemoteError(`${url}: the server sends whole files only, no byte ranges.`);
	if (status === 408 || status === 429 || status >= 500) throw new Error(`it answered ${status}`);
	throw new RemoteError(`${url}: the server answered ${status} ${response.statusText}.`);
}

/** The URL to fetch; an s3:// URL is signed with the credentials of the environment. */
function address(url: string): string {
	const s3 = /^s3:\/\/([^/]+)\/(.+)$/.exec(url);
	if (!s3) return url;
	try {
		return new S3Client({ bucket: s3[1]! }).presign(s3[2]!, { method: "GET", expiresIn: 3600 });
	} catch (error) {
		throw new RemoteError(`${url} cannot be requested: ${(error as Error).message}.`);
	}
}

async function retried<Result>(url: string, options: RequestOptions, run: () => Promise<Result>): Promise<Result> {
	for (let attempt = 1; ; attempt++) {
		try {
			return await run();
		} catch (error) {
			if (error instanceof RemoteError) throw error;
			if (attempt >= options.attempts) {
				// The first sentence of the message; further sentences are questions.
				const [reason] = (error as Error).message.split(/[.?!](?=\s|$)/);
				throw new RemoteError(`${url} could not be read in ${attempt} attempts; the last failure: ${reason}.`);
			}
			await Bun.sleep(options.backoffMilliseconds * 2 ** (attempt - 1));
		}
	}
}
