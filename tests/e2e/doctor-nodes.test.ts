/** `mimo doctor` on four hosts, made of network namespaces: it names the host that has a slow card. */
import { expect, test } from "bun:test";
import { absent, hasPrograms } from "../absent.ts";
import { executable } from "../commands/mimo.ts";

/** Hosts 10.77.0.1 to .4 behind a bridge; the third gets 100 Mbit/s. Everything goes with the shell's namespaces. */
const script = `
set -e
mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns
ip link add name bridge0 type bridge && ip link set bridge0 up
for i in 0 1 2 3; do
	ip netns add n$i && ip link add v$i type veth peer name e0 netns n$i && ip link set v$i master bridge0 up
	ip -n n$i addr add 10.77.0.$((i + 1))/24 dev e0 && ip -n n$i link set e0 up && ip -n n$i link set lo up
done
ip netns exec n2 tc qdisc add dev e0 root tbf rate 100mbit burst 256kb latency 50ms
[ $# -gt 0 ] || exit 0
export WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=21000 MIMO_SECRET=secret
for i in 1 2 3; do RANK=$i ip netns exec n$i "$@" & done
RANK=0 ip netns exec n0 "$@"
wait
`;

function inNamespaces(command: readonly string[]) {
	const { success, stdout, stderr } = Bun.spawnSync(["unshare", "-nm", "bash", "-c", script, "bash", ...command], {
		stdout: "pipe",
		stderr: "pipe",
	});
	return { success, stdout: stdout.toString(), stderr: stderr.toString() };
}

const hasHosts =
	hasPrograms(["unshare", "ip", "tc"], "util-linux iproute2") &&
	(inNamespaces([]).success || absent("the right to make network namespaces", "root") !== null);

test.skipIf(!hasHosts)(
	"the host with the slow card is named, with its rate",
	() => {
		// The processor may be busy with other work: the most accurate of three measurements counts.
		let error = Number.POSITIVE_INFINITY;
		for (let attempt = 0; attempt < 3 && error > 0.1; attempt++) error = Math.min(error, errorOfSlowLinks());
		expect(error).toBeLessThan(0.25);
	},
	60_000,
);

/** Checks one report of doctor; returns the largest relative error of the rates over the slow card. */
function errorOfSlowLinks(): number {
	const { success, stdout, stderr } = inNamespaces([executable, "doctor", "--json"]);
	expect({ success, stderr }).toEqual({ success: true, stderr: "" });
	const { findings, nodes } = JSON.parse(stdout) as {
		findings: { name: string; value: string; details?: { links: { nodes: string[]; rate: number }[] } }[];
		nodes: unknown[];
	};
	expect(nodes).toHaveLength(4);
	const network = findings.filter(({ name }) => name === "network");
	expect(network.map(({ value }) => value).join("\n")).toMatch(/\(task 2\) is slow: 0\.\d+ Gbit\/s against /);
	const { links } = network[0]!.details!;
	expect(links).toHaveLength(6);
	const isSlow = (pair: readonly string[]) => pair.some((node) => node.endsWith("(task 2)"));
	// These have no limit but the processor.
	for (const { nodes: pair, rate } of links) if (!isSlow(pair)) expect(rate).toBeGreaterThan(20e6);
	// 100 Mbit/s less headers.
	return Math.max(...links.filter(({ nodes: pair }) => isSlow(pair)).map(({ rate }) => Math.abs(rate / 11.8e6 - 1)));
}
