/**
 * Addresses of checkpoints in stores: s3://BUCKET/PREFIX, or https://HOST/PATH of a plain server. Credentials, region and endpoint
 * come from the standard AWS variables and are in no message.
 */
import { shownAddress } from "../../system/addresses.ts";
import { UserError } from "../../system/errors.ts";
import { type Credentials, encodePath } from "./signature.ts";

export type Environment = Readonly<Record<string, string | undefined>>;

/** Where requests for a URL go. */
export interface Target {
	readonly origin: string;
	/** Encoded, with a slash at its end: objects' keys follow it. */
	readonly base: string;
	/** Encoded path of the bucket itself, for listings. */
	readonly root: string;
	/** Decoded, "" or with a slash at its end. */
	readonly prefix: string;
	/** null: a plain server. */
	readonly credentials: Credentials | null;
}

/** The first of some variables that has a value. */
function first(environment: Environment, ...names: readonly string[]): string | null {
	return names.map((name) => environment[name]).find((value) => value) ?? null;
}

/** Whether a path names a store rather than a folder. */
export function isStoreUrl(path: string): boolean {
	return /^(s3|https?):\/\//.test(path);
}

/** Throws a UserError for a store's URL, where a folder is wanted. */
export function requireFolder(path: string): void {
	if (!isStoreUrl(path)) return;
	throw new UserError(
		`${path} is in an object store, which this command does not read: copy it to a folder first, as \`aws s3 sync\` does.`,
	);
}

/** Throws a UserError for an address of another form, and where an S3 store's credentials are absent. */
export function targetOf(url: string, environment: Environment): Target {
	const [, bucket, rest] = /^s3:\/\/([a-z0-9][a-z0-9.-]*)((?:\/.*)?)$/.exec(url) ?? [];
	if (bucket === undefined) {
		const { origin, pathname, search, hash, username, password } = URL.parse(url) ?? {};
		if (origin === undefined || url.startsWith("s3:") || search || hash || username || password) {
			const sentence = `${url} is no address of checkpoints; those are s3://BUCKET/PREFIX and https://HOST/PATH.`;
			throw new UserError(shownAddress(sentence));
		}
		const base = `${pathname!.replace(/\/+$/, "")}/`;
		return { origin, base, root: base, prefix: "", credentials: null };
	}
	const prefix = rest!.replace(/^\/+|\/+$/g, "");
	const region = first(environment, "S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION") ?? "us-east-1";
	const accessKey = first(environment, "S3_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID");
	const secretKey = first(environment, "S3_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY");
	if (accessKey === null || secretKey === null) {
		throw new UserError(`${url} needs credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment.`);
	}
	const token = first(environment, "S3_SESSION_TOKEN", "AWS_SESSION_TOKEN");
	const endpoint = first(environment, "S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT");
	const named = endpoint === null ? null : URL.parse(endpoint);
	if (endpoint !== null && (named === null || !/^https?:$/.test(named.protocol))) {
		throw new UserError(`${url}: the endpoint in the environment (AWS_ENDPOINT_URL) is no http(s) address.`);
	}
	// Certificates of Amazon's virtual hosts cover no names with dots.
	const inPath = named !== null || bucket.includes(".");
	const host = `s3.${region}.amazonaws.com`;
	const origin = named?.origin ?? `https://${inPath ? host : `${bucket}.${host}`}`;
	const root = `${(named?.pathname ?? "/").replace(/\/+$/, "")}/${inPath ? `${bucket}/` : ""}`;
	const folder = prefix === "" ? "" : `${prefix}/`;
	const credentials = { accessKey, secretKey, token, region };
	return { origin, base: root + encodePath(folder), root, prefix: folder, credentials };
}
