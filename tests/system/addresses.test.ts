/** What is shown of URLs, and which hosts count as private. */
import { expect, test } from "bun:test";
import { privateAddress, shownAddress } from "../../src/system/addresses.ts";

test("a URL loses its user information, query and fragment, and nothing else", () => {
	for (const [text, shown] of [
		["https://alice:s3cret@host:8443/a/b?X-Amz-Signature=d489#part", "https://host:8443/a/b"],
		["http://a@b:c@host/x", "http://host/x"],
		["s3://bucket/folder/shard-{000..007}.tar?t=1", "s3://bucket/folder/shard-{000..007}.tar"],
		["http://u:p'|^{}@host/x", "http://host/x"],
		["0.3 http://u:p@one/x?t=1 0.7 http://two/y", "0.3 http://one/x 0.7 http://two/y"],
		['it failed fetching "http://h/x?X-Amz-Credential=AKID%2F2". More?', 'it failed fetching "http://h/x". More?'],
		["https://host?token=1", "https://host"],
		["http://h/x?t=1: it ends (as http://u:p@h/y?t does).", "http://h/x: it ends (as http://h/y does)."],
		["/data/set?x", "/data/set?x"],
		["user@host: is this a question?", "user@host: is this a question?"],
	] as const) {
		expect(shownAddress(text)).toBe(shown);
		expect(shownAddress(shown)).toBe(shown);
	}
});

test("loopback, private, link-local and reserved hosts are private, however they are written", async () => {
	for (const host of [
		...["127.0.0.1", "0x7f.1", "2130706433", "localhost", "0.0.0.0", "10.1.2.3", "172.31.0.1", "192.168.1.1"],
		...["169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "[::1]", "[::]", "[fd00::1]", "[fe80::1]"],
		...["[fec0::1]", "[::ffff:10.0.0.1]", "[64:ff9b::192.168.0.1]", "[ff02::1]"],
		...["[64:ff9b:1::8.8.8.8]", "[2002:a01:203::1]", "[2002:7f00:1::]", "[2002:c0a8:101:1::5]", "[2002:ac1f:ffff::1]"],
	]) {
		expect([host, await privateAddress(new URL(`http://${host}:8080/x`))]).toEqual([host, expect.any(String)]);
	}
	for (const host of [
		"8.8.8.8",
		"172.32.0.1",
		"100.128.0.1",
		"[2606:4700::1111]",
		"[64:ff9b::8.8.8.8]",
		"[2002:808:808::1]",
		"[2002:ac20::1]",
		"name.invalid",
	]) {
		expect([host, await privateAddress(new URL(`http://${host}/x`))]).toEqual([host, null]);
	}
});
