/** Byte ranges over HTTP(S) and from S3-compatible stores, with retries. S3 through URLs that Bun's client signs. */
import { S3Client } from "bun";
import type { RemoteOptions, RemoteVersion } from "./remote-options.ts";

/** A failure that another try will not mend; `missing`: there is no such file. */
export class RemoteError extends Error {
	constructor(
		sentence: string,
		readonly missing = false,
	) {
		super(sentence);
	}
}

/** Size and tag of a file. Throws a RemoteError. */
export async function statRemote(
	url: string,
	options: RemoteOptions,
): Promise<{ readonly size: number; readonly etag: string | null }> {
	return await retried(url, options, async () => {
		const response = await request(url, 0, 1, options);
		const etag = tagOf(response);
		if (response.status === 416) return { size: 0, etag };
		const size = /\/(\d+)$/.exec(response.headers.get("content-range") ?? "")?.[1];
		await response.arrayBuffer();
		if (size === undefined) throw new RemoteError(`${url}: the server does not say how large the file is.`);
		return { size: Number(size), etag };
	});
}

/** Bytes [offset, offset + length) of a version of a file. Throws a RemoteError. */
export async function readRemote(
	{ url, etag }: RemoteVersion,
	offset: number,
	length: number,
	options: RemoteOptions,
): Promise<Uint8Array> {
	return await retried(url, options, async () => {
		const response = await request(url, offset, length, options);
		const found = tagOf(response);
		if (etag !== null && found !== null && found !== etag) {
			throw new RemoteError(`${url} changed while it was read: its tag was ${etag} and is ${found}.`);
		}
		const bytes = await bodyOf(response, options.stallMilliseconds);
		if (bytes.length !== length) throw new Error(`it sent ${bytes.length} of ${length} bytes`);
		return bytes;
	});
}

function tagOf({ headers }: Response): string | null {
	return headers.get("etag") ?? headers.get("last-modified");
}

/** The body; a pause of more than `stall` milliseconds between two pieces gives it up. */
async function bodyOf(response: Response, stall: number): Promise<Uint8Array> {
	const reader = response.body!.getReader();
	const pieces: Uint8Array[] = [];
	for (;;) {
		const late = Promise.withResolvers<never>();
		const timer = setTimeout(() => late.reject(new Error(`it sent nothing for ${stall / 1000} s`)), stall);
		try {
			const { done, value } = await Promise.race([reader.read(), late.promise]);
			if (done) return Buffer.concat(pieces);
			pieces.push(value);
		} catch (error) {
			void reader.cancel().catch(() => {});
			throw error;
		} finally {
			clearTimeout(timer);
		}
	}
}

async function request(url: string, offset: number, length: number, options: RemoteOptions): Promise<Response> {
	const response = await fetch(address(url), {
		headers: { Range: `bytes=${offset}-${offset + length - 1}` },
		signal: AbortSignal.timeout(options.stallMilliseconds * 4),
	});
	const { status } = response;
	if (status === 206 || (status === 416 && offset === 0)) return response;
	await response.body?.cancel();
	if (status === 404) throw new RemoteError(`${url} does not exist.`, true);
	if (status === 200) throw new RemoteError(`${url}: the server sends whole files only, no byte ranges.`);
	if (status === 408 || status === 429 || status >= 500) throw new Error(`it answered ${status}`);
	throw new RemoteError(`${url}: the server answered ${status} ${response.statusText}.`);
}

/** The URL to fetch: an s3:// one is signed with the credentials of the environment. */
function address(url: string): string {
	const s3 = /^s3:\/\/([^/]+)\/(.+)$/.exec(url);
	if (!s3) return url;
	try {
		return new S3Client({ bucket: s3[1]! }).presign(s3[2]!, { method: "GET", expiresIn: 3600 });
	} catch (error) {
		throw new RemoteError(`${url} cannot be asked for: ${(error as Error).message}.`);
	}
}

async function retried<Result>(url: string, options: RemoteOptions, run: () => Promise<Result>): Promise<Result> {
	for (let attempt = 1; ; attempt++) {
		try {
			return await run();
		} catch (error) {
			if (error instanceof RemoteError) throw error;
			if (attempt >= options.attempts) {
				throw new RemoteError(
					`${url} could not be read after ${attempt} tries; the last: ${(error as Error).message}.`,
				);
			}
			await Bun.sleep(options.backoffMilliseconds * 2 ** (attempt - 1));
		}
	}
}
