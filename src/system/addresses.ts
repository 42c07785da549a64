/** Network addresses: what of a URL may be shown or stored, and which hosts are inside the user's own network. */
import type { BlockList } from "node:net";

/** A URL in a text, up to what a URL cannot have or what ends a part of a sentence. */
const urlInText = /\b([a-z][a-z0-9+.-]{0,30}:\/\/)([^\s"<>]*[^\s"<>.,:;!?')\]])/gi;

/**
 * A text without the secrets of the URLs in it: user information, query and fragment are left out, as signatures and tokens
 * stand there. Other text stays as it is, and so do URLs without such parts.
 */
export function shownAddress(text: string): string {
	return text.replace(urlInText, (_, scheme: string, rest: string) => {
		const [authority] = /^[^/?#]*/.exec(rest)!;
		const host = authority.slice(authority.lastIndexOf("@") + 1);
		const [path] = /^[^?#]*/.exec(rest.slice(authority.length))!;
		return `${scheme}${host}${path}`;
	});
}

/**
 * Addresses that only the user's own machine or network reaches (IANA's special-purpose registries): this host, loopback,
 * private use (RFC 1918, RFC 6598, unique local and site-local IPv6), link-local, multicast and reserved, and a network's own
 * translation to IPv4 (RFC 8215). An IPv4 address within IPv6 (mapped, of the well-known NAT64 prefix, or of 6to4) counts as the
 * IPv4 address.
 */
const innerIpv4 = [
	...["0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"],
	...["192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"],
];
const innerIpv6 = ["::/127", "fc00::/7", "fe80::/9", "ff00::/8", "64:ff9b:1::/48"];

let inner: BlockList | null = null;

/**
 * The address of a URL's host that is inside the user's own machine or network; null: all of its addresses are public, or its
 * name has none. A name counts as what it stands for at the moment.
 */
export async function privateAddress(url: URL): Promise<string | null> {
	// Loading the module takes 30 ms, which commands without a network do not wait for.
	const net = await import("node:net");
	inner ??= listOf(new net.BlockList());
	const host = url.hostname.replace(/^\[|\]$/g, "");
	const addresses = net.isIP(host) !== 0 ? [host] : await addressesOf(host);
	return addresses.find((address) => inner!.check(address, net.isIP(address) === 6 ? "ipv6" : "ipv4")) ?? null;
}

function listOf(list: BlockList): BlockList {
	const split = (subnet: string) => subnet.split("/") as [address: string, bits: string];
	for (const [address, bits] of innerIpv4.map(split)) {
		list.addSubnet(address, Number(bits), "ipv4");
		list.addSubnet(`64:ff9b::${address}`, 96 + Number(bits), "ipv6");
		const hexadecimal = Buffer.from(address.split(".").map(Number)).toString("hex");
		list.addSubnet(`2002:${hexadecimal.slice(0, 4)}:${hexadecimal.slice(4)}::`, 16 + Number(bits), "ipv6");
	}
	for (const [address, bits] of innerIpv6.map(split)) list.addSubnet(address, Number(bits), "ipv6");
	return list;
}

async function addressesOf(name: string): Promise<string[]> {
	try {
		return (await Bun.dns.lookup(name)).map(({ address }) => address.replace(/%.*$/, ""));
	} catch {
		return [];
	}
}
