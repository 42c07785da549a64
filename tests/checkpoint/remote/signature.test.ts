import { expect, test } from "bun:test";
import { encodePath, signedHeaders } from "../../../src/checkpoint/remote/signature.ts";

// The examples of https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
const credentials = {
	accessKey: "AKIAIOSFODNN7EXAMPLE",
	secretKey: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
	token: null,
	region: "us-east-1",
};
const origin = "https://examplebucket.s3.amazonaws.com";
const now = new Date("2013-05-24T00:00:00Z");
const empty = new Uint8Array(0);

const examples: [what: string, request: Parameters<typeof signedHeaders>[0], signed: Record<string, string>, string][] =
	[
		[
			"a range of an object",
			{ method: "GET", origin, path: "/test.txt", query: {}, body: empty },
			{ range: "bytes=0-9" },
			"f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
		],
		[
			"a new object",
			{
				method: "PUT",
				origin,
				path: encodePath("/test$file.text"),
				query: {},
				body: new TextEncoder().encode("Welcome to Amazon S3."),
			},
			{ date: "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY" },
			"98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
		],
		[
			"a parameter without a value",
			{ method: "GET", origin, path: "/", query: { lifecycle: "" }, body: empty },
			{},
			"fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
		],
		[
			"parameters in any order",
			{ method: "GET", origin, path: "/", query: { prefix: "J", "max-keys": "2" }, body: empty },
			{},
			"34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
		],
	];

for (const [what, request, signed, signature] of examples) {
	test(`Amazon's example: ${what}`, () => {
		expect(signedHeaders(request, credentials, { now, signed }).authorization).toEndWith(`Signature=${signature}`);
	});
}

test("a token is sent and signed", () => {
	const headers = signedHeaders(
		{ method: "GET", origin, path: "/", query: {}, body: empty },
		{ ...credentials, token: "temporary" },
	);
	expect(headers["x-amz-security-token"]).toBe("temporary");
	expect(headers.authorization).toContain("SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token,");
});
