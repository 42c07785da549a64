/**
 * Signature Version 4 of requests to S3-compatible stores, in the Authorization header
 * (https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html). The digest of the body is signed along: a store
 * refuses a body that arrives with other bytes.
 */
import { createHash, createHmac } from "node:crypto";

export interface Credentials {
	readonly accessKey: string;
	readonly secretKey: string;
	/** Of temporary credentials; null: permanent ones. */
	readonly token: string | null;
	readonly region: string;
}

export interface SignedRequest {
	readonly method: string;
	/** Scheme, host and port. */
	readonly origin: string;
	/** Encoded with `encodePath`. */
	readonly path: string;
	readonly query: Readonly<Record<string, string>>;
	readonly body: Uint8Array;
}

/** Percent-encodes all but the unreserved characters of RFC 3986. */
function encode(text: string): string {
	return encodeURIComponent(text).replace(/[!'()*]/g, (one) => `%${one.charCodeAt(0).toString(16).toUpperCase()}`);
}

export function encodePath(path: string): string {
	return path.split("/").map(encode).join("/");
}

export function encodeQuery(query: Readonly<Record<string, string>>): string {
	const pairs = Object.entries(query).map(([name, value]) => [encode(name), encode(value)] as const);
	return pairs
		.sort(([a], [b]) => (a < b ? -1 : 1))
		.map((pair) => pair.join("="))
		.join("&");
}

/** The headers with which the store accepts the request; `signed` are further ones that the signature covers, in lower case. */
export function signedHeaders(
	{ method, origin, path, query, body }: SignedRequest,
	{ accessKey, secretKey, token, region }: Credentials,
	{ now = new Date(), signed = {} }: { readonly now?: Date; readonly signed?: Readonly<Record<string, string>> } = {},
): Record<string, string> {
	const time = now.toISOString().replace(/[-:]|\.\d{3}/g, "");
	const scope = `${time.slice(0, 8)}/${region}/s3/aws4_request`;
	const bodyDigest = createHash("sha256").update(body).digest("hex");
	const headers: Record<string, string> = {
		...signed,
		"x-amz-content-sha256": bodyDigest,
		"x-amz-date": time,
		...(token === null ? {} : { "x-amz-security-token": token }),
	};
	const all = Object.entries({ ...headers, host: new URL(origin).host }).sort(([a], [b]) => (a < b ? -1 : 1));
	const names = all.map(([name]) => name).join(";");
	const lines = all.map(([name, value]) => `${name}:${value}\n`).join("");
	const request = [method, path, encodeQuery(query), lines, names, bodyDigest].join("\n");
	const digest = createHash("sha256").update(request).digest("hex");
	const key = [...scope.split("/")].reduce<Uint8Array | string>(
		(last, part) => createHmac("sha256", last).update(part).digest(),
		`AWS4${secretKey}`,
	);
	const signature = createHmac("sha256", key).update(`AWS4-HMAC-SHA256\n${time}\n${scope}\n${digest}`).digest("hex");
	return {
		...headers,
		authorization: `AWS4-HMAC-SHA256 Credential=${accessKey}/${scope},SignedHeaders=${names},Signature=${signature}`,
	};
}
