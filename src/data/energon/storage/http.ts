/** Reads byte ranges over HTTP(S) and from S3-compatible stores, with retries; Bun's client signs the URLs of S3. */
import { S3Client } from "bun";
import { privateAddress, shownAddress } from "../../../system/addresses.ts";
import { counted } from "../../../system/counted.ts";
import type { RemoteOptions, RemoteVersion } from "./storage.ts";

/** A permanent failure, which is not retried; `missing`: the file does not exist. The sentence shows URLs without their secrets. */
export class RemoteError extends Error {
	constructor(
		sentence: string,
		readonly missing = false,
	) {
		super(shownAddress(sentence));
	}
}

/** All attempts together have taken too long. */
export class LateError extends RemoteError {}

/** Number of attempts, the pauses and time limits of requests, and the redirects that are followed. */
export type RequestOptions = Pick<
	RemoteOptions,
	"attempts" | "backoffMilliseconds" | "stallMilliseconds" | "timeoutMilliseconds" | "privateRedirects"
>;

const LONGEST_REDIRECTION = 10;

/** Bytes of the largest file that a server may announce. */
export const LARGEST_FILE = 2 ** 46;

/** Size and tag of a file. Throws a RemoteError. */
export async function statRemote(
	url: string,
	options: RequestOptions,
): Promise<{ readonly size: number; readonly etag: string | null }> {
	return await retried(url, "its size", options, async (clock) => {
		const response = await request(url, 0, 1, clock);
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
	return await retried(url, `bytes ${offset} to ${offset + length - 1}`, options, async (clock) => {
		const response = await request(url, offset, length, clock);
		try {
			const found = tagOf(response.headers);
			if (etag !== null && found !== null && found !== etag) {
				throw new RemoteError(`${url} changed while it was read: its tag was ${etag} and is ${found}.`);
			}
			const now = response.status === 416 ? 0 : sizeOf(url, response.headers, offset, length);
			if (now !== size) throw new RemoteError(`${url} changed while it was read: it had ${size} bytes and has ${now}.`);
			return await bodyOf(url, response, length, clock);
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
 * The `length` bytes of a body, which may not be longer. A pause between two pieces that is longer than the clock allows is a
 * failure.
 */
async function bodyOf(url: string, response: Response, length: number, clock: Clock): Promise<Uint8Array> {
	const { stallMilliseconds } = clock.options;
	const tooMuch = () => new RemoteError(`${url}: the server sends more than the ${length} requested bytes.`);
	if (Number(response.headers.get("content-length")) > length) throw tooMuch();
	const bytes = new Uint8Array(length);
	let filled = 0;
	if (response.body === null) throw new Error("it sent no bytes");
	const reader = response.body.getReader();
	try {
		for (;;) {
			const late = Promise.withResolvers<never>();
			const wait = clock.forPiece();
			const silent = wait === stallMilliseconds;
			const failure = () =>
				new Error(silent ? `it sent nothing for ${wait / 1000} s` : `it sent ${filled} of ${length} bytes`);
			const timer = setTimeout(() => late.reject(failure()), wait);
			try {
				const { done, value } = await Promise.race([reader.read(), late.promise]);
				if (done) break;
				if (filled + value.length > length) throw tooMuch();
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

async function request(url: string, offset: number, length: number, clock: Clock): Promise<Response> {
	const answered = new AbortController();
	const timer = setTimeout(() => answered.abort(new Error("it gave no answer")), clock.forAnswer());
	const response = await follow(url, clock.options, {
		// Ranges of compressed answers differ, and they could inflate to any size.
		headers: { Range: `bytes=${offset}-${offset + length - 1}`, "Accept-Encoding": "identity" },
		decompress: false,
		signal: answered.signal,
	}).finally(() => clearTimeout(timer));
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

/**
 * The answer of the last server that redirects lead to. The user has named the first host alone: a server may not send the
 * requests of this machine to another one inside its network without --data-private-redirects.
 */
async function follow(url: string, { privateRedirects }: RequestOptions, init: BunFetchRequestInit): Promise<Response> {
	const first = address(url);
	for (let at = first, redirects = 0; ; redirects++) {
		const response = await fetch(at, { ...init, redirect: "manual" });
		const location = response.headers.get("location");
		if (location === null || ![301, 302, 303, 307, 308].includes(response.status)) return response;
		await response.body?.cancel();
		const to = URL.parse(location, at);
		if (to === null || !/^https?:$/.test(to.protocol)) {
			throw new RemoteError(
				`${url}: the server redirects to ${brief(shownAddress(location))}, which is no address of HTTP.`,
			);
		}
		if (redirects === LONGEST_REDIRECTION) {
			throw new RemoteError(`${url}: the server redirects more than ${LONGEST_REDIRECTION} times.`);
		}
		const inside = privateRedirects || to.host === new URL(first).host ? null : await privateAddress(to);
		if (inside !== null) {
			throw new RemoteError(
				`${url}: the server redirects to ${to.host} (${inside}), inside this machine's own network: --data-private-redirects allows it.`,
			);
		}
		at = to.href;
	}
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

/** The time that a read has: for one attempt's next piece, and for all attempts together. */
class Clock {
	readonly #end: number;

	constructor(readonly options: RequestOptions) {
		this.#end = performance.now() + options.timeoutMilliseconds;
	}

	isOver(): boolean {
		return this.#left() <= 0;
	}

	/** Milliseconds that may pass until an answer begins: another connection may help where one is lost. */
	forAnswer(): number {
		const { stallMilliseconds, timeoutMilliseconds } = this.options;
		return Math.min(4 * stallMilliseconds, timeoutMilliseconds / 3, this.#left());
	}

	/** Milliseconds that may pass between two pieces of an answer. */
	forPiece(): number {
		return Math.min(this.options.stallMilliseconds, this.#left());
	}

	/** Waits before another attempt. */
	async pause(milliseconds: number): Promise<void> {
		await Bun.sleep(Math.min(milliseconds, this.#left()));
	}

	#left(): number {
		return Math.max(0, this.#end - performance.now());
	}
}

/** Reads `piece` of a file; failures are retried as often, and as long, as the options say. */
async function retried<Result>(
	url: string,
	piece: string,
	options: RequestOptions,
	read: (clock: Clock) => Promise<Result>,
): Promise<Result> {
	const clock = new Clock(options);
	for (let attempt = 1; ; attempt++) {
		try {
			return await read(clock);
		} catch (error) {
			if (error instanceof RemoteError) throw error;
			// The first sentence of the message; further sentences are questions.
			const [reason] = (error as Error).message.split(/[.?!](?=\s|$)/);
			const tried = `${counted(attempt, "attempt")}; the last failure: ${reason}.`;
			if (attempt >= options.attempts) throw new RemoteError(`${url} could not be read in ${tried}`);
			await clock.pause(options.backoffMilliseconds * 2 ** (attempt - 1));
			if (!clock.isOver()) continue;
			const limit = options.timeoutMilliseconds / 1000;
			throw new LateError(`${named(url)}: ${piece} did not arrive within ${limit} s, in ${tried}`);
		}
	}
}

/** A URL that names the server, which an s3:// URL alone does not. */
function named(url: string): string {
	return url.startsWith("s3:") ? `${url} (on ${new URL(address(url)).host})` : url;
}
