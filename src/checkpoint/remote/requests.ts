/** Requests that are repeated after failures which may pass: a cut or silent connection, an overloaded server, a damaged body. */
import { shownAddress } from "../../system/addresses.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";

export interface RequestOptions {
	/** Number of attempts without progress. */
	readonly attempts: number;
	/** Pause after the first attempt, which doubles after each, and the longest. */
	readonly backoffMilliseconds: number;
	readonly longestBackoff: number;
	/** Milliseconds without an answer, or between two pieces of one, after which a connection counts as lost. */
	readonly stallMilliseconds: number;
	/** Slowest upload that is waited for. */
	readonly leastBytesPerSecond: number;
	/** Bytes of a part of a large upload, and the parts on their way at once. */
	readonly partBytes: number;
	readonly parallelParts: number;
}

export const defaultRequests: RequestOptions = {
	attempts: 10,
	backoffMilliseconds: 250,
	longestBackoff: 15_000,
	stallMilliseconds: 30_000,
	leastBytesPerSecond: 2 ** 16,
	partBytes: 2 ** 24,
	parallelParts: 4,
};

/** Attempts that a refusal (401, 403) is given: credentials and gates in front of stores fail for moments too. */
const REFUSALS = 3;

/** An answer that says no to the caller's right to ask. */
class Refusal extends Error {}

/** Repeats `attempt` until it succeeds, throws a UserError, or has failed too often; `progressed` says that the latest brought something. */
export async function retried<Result>(
	what: string,
	options: RequestOptions,
	attempt: (number: number) => Promise<Result>,
	progressed: () => boolean = () => false,
): Promise<Result> {
	let [failures, refusals] = [0, 0];
	for (let number = 1; ; number++) {
		try {
			return await attempt(number);
		} catch (error) {
			if (error instanceof UserError) throw error;
			if (progressed()) [failures, refusals] = [0, 0];
			failures++;
			if (error instanceof Refusal) refusals++;
			// The first sentence of the message; further ones are advice for programmers.
			const [reason] = (error as Error).message.split(/[.?!](?=\s|$)/);
			if (failures >= options.attempts || refusals >= REFUSALS) {
				throw new UserError(
					shownAddress(`${what} failed in ${counted(number, "attempt")}; the last failure: ${reason}.`),
				);
			}
			const pause = options.backoffMilliseconds * 2 ** (failures - 1);
			// Ranks that failed together do not come back together.
			await Bun.sleep(Math.min(pause, options.longestBackoff) * (0.75 + Math.random() / 2));
		}
	}
}

/** The pieces of an answer; a longer pause than the options allow is a failure. */
export async function* piecesOf(response: Response, { stallMilliseconds }: RequestOptions): AsyncGenerator<Uint8Array> {
	if (response.body === null) return;
	const reader = response.body.getReader();
	try {
		for (;;) {
			const late = Promise.withResolvers<never>();
			const failure = new Error(`it sent nothing for ${stallMilliseconds / 1000} s`);
			const timer = setTimeout(() => late.reject(failure), stallMilliseconds);
			try {
				const { done, value } = await Promise.race([reader.read(), late.promise]);
				if (done) return;
				yield value;
			} finally {
				clearTimeout(timer);
			}
		}
	} finally {
		await reader.cancel().catch(() => {});
	}
}

/** Sends one request; the caller reads the body of the answer. */
export async function ask(url: string, init: BunFetchRequestInit, options: RequestOptions): Promise<Response> {
	const bytes = init.body instanceof Blob ? init.body.size : ((init.body as Uint8Array | undefined)?.byteLength ?? 0);
	const abort = new AbortController();
	const limit = options.stallMilliseconds + (1000 * bytes) / options.leastBytesPerSecond;
	const timer = setTimeout(() => abort.abort(new Error(`it gave no answer in ${Math.round(limit / 1000)} s`)), limit);
	try {
		return await fetch(url, { ...init, redirect: "manual", decompress: false, signal: abort.signal });
	} finally {
		clearTimeout(timer);
	}
}

/** Error codes of S3 with status 400 or 409 that another attempt may not meet. */
const passing = new Set([
	...["RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "SlowDown", "InternalError"],
	...["OperationAborted", "ConditionalRequestConflict", "RequestTimeTooSkewed"],
]);

/** Throws the failure that an answer of S3 or of a plain server means: one that may pass, or a UserError. */
export function failWith(what: string, { status, headers }: Response, text: string): never {
	const [, code = ""] = /<Code>([^<]*)<\/Code>/.exec(text) ?? [];
	const answer = `the answer was ${status}${code === "" ? "" : ` ${code.slice(0, 60)}`}`;
	if (status >= 500 || status === 408 || status === 429 || passing.has(code)) throw new Error(answer);
	if (status === 401 || status === 403) throw new Refusal(answer);
	const region = headers.get("x-amz-bucket-region");
	const hint = region === null || status >= 400 ? "" : `: the bucket is in the region ${region} (AWS_REGION)`;
	throw new UserError(shownAddress(`${what} failed: ${answer}${hint}.`));
}
