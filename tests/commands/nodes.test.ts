/** doctor's findings about GPUs and about several nodes. */
import { expect, test } from "bun:test";
import { compareNodes } from "../../src/commands/doctor.ts";
import type { Finding } from "../../src/commands/machine.ts";
import { type DriverTool, inspectAccelerators } from "../../src/commands/machine.ts";
import { compareLinks, type Link, linksOf, type NodeReport, overNccl } from "../../src/commands/node-links.ts";
import { gather } from "../../src/launch/gather-reports.ts";
import type { Place } from "../../src/launch/place.ts";
import { listen } from "../../src/launch/rendezvous/line-connection.ts";

const healthy = "NVIDIA H100 80GB HBM3, 570.1, 81559, 4, 1980, 1980, 0x0000000000000000, 0";

function driver(gpus: readonly string[], peers: string | null): DriverTool {
	const table = gpus.map((gpu, index) => `${index}, ${gpu}`).join("\n");
	return (args) => (args[0] === "topo" ? peers : `${table}\n`);
}

const summary = (findings: readonly Finding[]) =>
	findings.map(({ name, state, value }) => `${name} ${state}: ${value}`);

test("healthy GPUs take two lines, and their peer access a third", () => {
	const peers = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\nLegend:\n  X = Self\n";
	expect(summary(inspectAccelerators(driver([healthy, healthy], peers)))).toEqual([
		"driver good: NVIDIA 570.1",
		"GPUs good: 2 × NVIDIA H100 80GB HBM3",
		"peer access good: between all 2 GPUs",
	]);
});

test("a throttled, a faulty and an occupied GPU are named, and peers that do not reach each other", () => {
	const gpus = [
		healthy.replace("1980, 1980, 0x0000000000000000", "600, 1980, 0x0000000000000048"),
		healthy.replace(/0$/, "3"),
		healthy.replace("81559, 4", "81559, 70000").replace("H100", "A100"),
	];
	const peers = " GPU0\tX\tOK\tNS\n GPU1\tOK\tX\tOK\n GPU2\tNS\tOK\tX\n";
	expect(summary(inspectAccelerators(driver(gpus, peers)))).toEqual([
		"driver good: NVIDIA 570.1",
		"GPUs warning: 2 × NVIDIA H100 80GB HBM3, 1 × NVIDIA A100 80GB HBM3",
		"GPU 0 warning: throttled (hardware slowdown, heat): 600 of 1980 MHz",
		"GPU 1 problem: 3 uncorrected memory errors",
		"GPU 2 warning: 70000 MiB are in use",
		"peer access warning: not between 0→2 NS, 2→0 NS",
	]);
	expect(inspectAccelerators(() => null)[0]!.state).toBe("information");
});

test("common facts of nodes are printed once, different facts with the node, and a wrong clock is named", () => {
	const report = (host: string, driverVersion: string, disk: Finding["state"]): NodeReport => ({
		host,
		first: true,
		port: 1,
		findings: [
			{ name: "driver", value: driverVersion, state: "good" },
			{ name: "memory", value: `${host === "n1" ? 90 : 80}.0 GiB available of 100.0 GiB`, state: "information" },
			{ name: "disk", value: "1.0 GiB free of 9.0 GiB for save", state: disk },
		],
	});
	const told = (rank: number, one: NodeReport, skew: number) => ({ rank, report: one, skew, uncertainty: 1 });
	const findings = compareNodes([
		told(0, report("n1", "570.1", "good"), 0),
		told(1, report("n2", "570.1", "good"), 3),
		told(2, report("n3", "560.9", "problem"), -2500),
	]);
	expect(summary(findings)).toEqual([
		"driver good: 570.1 (2 nodes)",
		"driver warning: 560.9 on n3 (task 2)",
		"memory information: 90.0 GiB available of 100.0 GiB",
		"disk good: 1.0 GiB free of 9.0 GiB for save (2 nodes)",
		"disk problem: 1.0 GiB free of 9.0 GiB for save on n3 (task 2)",
		"clocks warning: n3 (task 2) is 2500 ms behind task 0",
	]);
});

test("a slow node, a slow pair and a missing link are named, compared with the median", () => {
	const link = (a: number, b: number, rate: number | null): Link => ({
		nodes: [`n${a}`, `n${b}`],
		rate: rate === null ? null : rate * 1e9,
		failure: rate === null ? "connection refused" : null,
	});
	const among = (nodes: number, rate: (a: number, b: number) => number | null) =>
		Array.from({ length: nodes }, (_, b) => Array.from({ length: b }, (_, a) => link(a, b, rate(a, b)))).flat();
	expect(summary(compareLinks(among(4, () => 1)))).toEqual([
		"network good: 6 pairs of nodes over TCP: 8.00 Gbit/s, at least 8.00 Gbit/s",
	]);
	// Two nodes cannot say which of them it is: there is nothing to compare with.
	expect(summary(compareLinks(among(2, () => 0.01)))).toEqual([
		"network good: 1 pair of nodes over TCP: 0.0800 Gbit/s, at least 0.0800 Gbit/s",
	]);
	expect(summary(compareLinks(among(5, (a, b) => (a === 2 || b === 2 ? 0.1 : 1))))).toEqual([
		"network information: 10 pairs of nodes over TCP: 8.00 Gbit/s, at least 0.800 Gbit/s",
		"network warning: n2 is slow: 0.800 Gbit/s against 8.00 Gbit/s",
	]);
	expect(summary(compareLinks(among(3, (a, b) => (a === 2 || b === 2 ? 0.1 : 1))))[1]).toBe(
		"network warning: n2 is slow: 0.800 Gbit/s against 8.00 Gbit/s",
	);
	const mixed = among(5, (a, b) => (a === 0 && b === 1 ? 0.25 : a === 3 && b === 4 ? null : 1));
	expect(summary(compareLinks(mixed))).toEqual([
		"network information: 10 pairs of nodes over TCP: 8.00 Gbit/s, at least 2.00 Gbit/s",
		"network problem: n3 and n4 do not reach each other: connection refused",
		"network warning: n0 and n1: 2.00 Gbit/s against 8.00 Gbit/s",
	]);
	expect(compareLinks([])).toEqual([]);
});

test("ranks report to rank 0, which compares their clocks and asks questions; a process without the secret is ignored, an absent rank named", async () => {
	const probe = await listen({ host: "127.0.0.1", port: 0 }, () => {});
	probe.server.close();
	const place = (rank: number, worldSize: number): Place => ({
		...{ rank, worldSize, localRank: 0, localSize: 1, port: probe.port, secret: "s", launcher: null },
		address: "127.0.0.1",
	});
	const told = (rank: number, size: number, milliseconds: number, secret = "s") =>
		gather(
			{ ...place(rank, size), secret },
			`report ${rank}`,
			{ milliseconds, answer: async (question) => `${rank} heard ${question}` },
			async (everyone) => {
				const answers = await Promise.all(everyone.map((one) => one.ask(one.rank * 10)));
				return everyone.map((one, i) => ({ ...one, answer: answers[i] }));
			},
		);
	const [all, one, two] = await Promise.all([told(0, 3, 20_000), told(1, 3, 20_000), told(2, 3, 20_000)]);
	expect([one, two]).toEqual([null, null]);
	expect(all!.map(({ rank, report, answer }) => [rank, report, answer])).toEqual([
		[0, "report 0", "0 heard 0"],
		[1, "report 1", "1 heard 10"],
		[2, "report 2", "2 heard 20"],
	]);
	for (const { skew, uncertainty } of all!) expect(Math.abs(skew)).toBeLessThan(uncertainty + 50);
	await expect(Promise.all([told(0, 2, 500), told(1, 2, 500, "t")])).rejects.toThrow(
		"Ranks 1 did not answer rank 0 within 0.5 s.",
	);
}, 30_000);

test("NCCL links have the rate of the slower direction, and a slow node is named", () => {
	const names = ["n1", "n2", "n3", "n4"];
	const rates = [0, 1, 2, 3].flatMap((from) =>
		[0, 1, 2, 3].flatMap((to) => (from === to ? [] : [{ from, to, rate: from === 2 ? 5e9 : 50e9 }])),
	);
	const links = linksOf(names, rates);
	expect(links).toHaveLength(6);
	expect(links.find(({ nodes }) => nodes.join() === "n2,n3")!.rate).toBe(5e9);
	expect(summary(compareLinks(links, overNccl))).toEqual([
		"NCCL links information: 6 pairs of nodes over NCCL: 400 Gbit/s, at least 40.0 Gbit/s",
		"NCCL links warning: n3 is slow: 40.0 Gbit/s against 400 Gbit/s",
	]);
});
