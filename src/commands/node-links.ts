/** Measures the TCP bandwidth between the nodes of a job, each pair in both directions, and names the slow ones. */
import { type Destination, pairsInRounds } from "../launch/bandwidth.ts";
import type { RankReport, ReportingRank } from "../launch/gather-reports.ts";
import { identityOf, joinRun } from "../launch/join.ts";
import type { Place } from "../launch/place.ts";
import type { Device } from "../native/device.ts";
import { openDevice } from "../native/open-device.ts";
import type { Run } from "../native/run.ts";
import { median } from "../observe/series.ts";
import { RunGroup, World } from "../parallel/index.ts";
import { counted } from "../system/counted.ts";
import { messageOf } from "../system/errors.ts";
import { programVersion } from "../system/program-version.ts";
import { Tensor } from "../tensor/index.ts";
import type { Finding } from "./machine.ts";

/** Findings of one task. */
export interface NodeReport {
	readonly host: string;
	readonly findings: readonly Finding[];
	/** Whether the task is the first of its node, which measures the node's network. */
	readonly first: boolean;
	/** Port of the task's ByteSink. */
	readonly port: number;
}

/** "n3 (task 2)". */
export function nodeName({ rank, report }: Pick<RankReport<NodeReport>, "rank" | "report">): string {
	return `${report.host} (task ${rank})`;
}

/** A link between two nodes: bytes a second in the slower direction, or the reason why it could not be measured. */
export interface Link {
	readonly nodes: readonly [string, string];
	readonly rate: number | null;
	readonly failure: string | null;
}

/** Links below this share of the nodes' usual rate are reported as slow. */
const slow = 0.5;

export async function measureLinks(nodes: readonly ReportingRank<NodeReport>[]): Promise<Link[]> {
	const measure = async ([from, to]: readonly [number, number]) => {
		const [a, b] = [nodes[from]!, nodes[to]!];
		return link(a, b, [await sendRate(a, b), await sendRate(b, a)]);
	};
	const rounds = pairsInRounds(nodes.length);
	const links: Link[] = [];
	for (const round of rounds) links.push(...(await Promise.all(round.map(measure))));
	// A slow link is measured again alone: other measurements or a busy processor may have slowed it.
	const usual = usualRate(links);
	for (const [index, pair] of rounds.flat().entries()) {
		const { rate } = links[index]!;
		if (rate === null || rate >= slow * usual) continue;
		const again = await measure(pair);
		if (again.rate !== null && again.rate > rate) links[index] = again;
	}
	return links;
}

type Answer = { readonly rate?: number; readonly failure?: string };

async function sendRate(from: ReportingRank<NodeReport>, to: ReportingRank<NodeReport>): Promise<Answer> {
	const question: Destination = { addresses: to.addresses, port: to.report.port };
	return (await from.ask(question)) as Answer;
}

function link(a: ReportingRank<NodeReport>, b: ReportingRank<NodeReport>, answers: readonly Answer[]): Link {
	const failure = answers.find((one) => one.failure !== undefined)?.failure ?? null;
	const rate = failure === null ? Math.min(...answers.map((one) => one.rate!)) : null;
	return { nodes: [nodeName(a), nodeName(b)], rate, failure };
}

/** "9.4 Gbit/s". */
function gigabits(rate: number): string {
	return `${((8 * rate) / 1e9).toPrecision(3)} Gbit/s`;
}

/** A method of measuring links: the name of its findings, the network it uses, and advice about slow links. */
export interface LinkMethod {
	readonly name: string;
	readonly over: string;
	readonly node: string;
	readonly pair: string;
}
const overTcp: LinkMethod = {
	name: "network",
	over: "TCP",
	node: "check its network card, cable and port, or leave it out",
	pair: "check the network between them",
};
export const overNccl: LinkMethod = {
	name: "NCCL links",
	over: "NCCL",
	node: "find its network card with NCCL_DEBUG=INFO and check it, or leave the node out",
	pair: "find with NCCL_DEBUG=INFO the transport that NCCL uses between them",
};

/** Links between nodes from the receivers' rates, each with the rate of its slower direction. */
export function linksOf(names: readonly string[], rates: readonly NcclRate[]): Link[] {
	const slower = new Map<string, Link>();
	for (const { from, to, rate } of rates) {
		const [low, high] = [Math.min(from, to), Math.max(from, to)];
		const before = slower.get(`${low} ${high}`)?.rate ?? Number.POSITIVE_INFINITY;
		slower.set(`${low} ${high}`, {
			nodes: [names[low]!, names[high]!],
			rate: Math.min(before, rate),
			failure: null,
		});
	}
	return [...slower.values()];
}

/** An overview of all links, then findings about nodes and pairs that are slow or do not reach each other. */
export function compareLinks(links: readonly Link[], method: LinkMethod = overTcp): Finding[] {
	const { name } = method;
	const rates = links.flatMap(({ rate }) => (rate === null ? [] : [rate]));
	const broken = links
		.filter(({ failure }) => failure !== null)
		.map(({ nodes, failure }): Finding => {
			const value = `${nodes.join(" and ")} do not reach each other: ${failure}`;
			return { name, value, state: "problem", advice: "every rank of a run connects to the others" };
		});
	if (rates.length === 0) return broken;
	const usual = usualRate(links);
	const least = Math.min(...rates);
	const details = { reached: usual, links };
	const all = `${counted(links.length, "pair")} of nodes over ${method.over}: ${gigabits(usual)}`;
	const lagging = links.filter(({ rate }) => rate !== null && rate < slow * usual);
	const overview: Finding = {
		name,
		value: `${all}, at least ${gigabits(least)}`,
		state: lagging.length === 0 && broken.length === 0 ? "good" : "information",
		details,
	};
	return [overview, ...broken, ...slowFindings(lagging, links, usual, method)];
}

/**
 * Median over the nodes of each node's fastest link. One slow node of few takes part in most links, so the median link would be
 * slow.
 */
function usualRate(links: readonly Link[]): number {
	const best = new Map<string, number>();
	for (const { nodes, rate } of links)
		for (const node of nodes) best.set(node, Math.max(best.get(node) ?? 0, rate ?? 0));
	return median([...best.values()]);
}

/** Warnings about nodes most of whose links are slow, then about slow links between other nodes. */
function slowFindings(lagging: readonly Link[], links: readonly Link[], usual: number, method: LinkMethod): Finding[] {
	const ofNode = (node: string, among: readonly Link[]) => among.filter(({ nodes }) => nodes.includes(node));
	const named = new Set(lagging.flatMap(({ nodes }) => nodes));
	const nodes = [...named].filter((node) => {
		const own = ofNode(node, links).length;
		return own > 1 && ofNode(node, lagging).length > own / 2;
	});
	const warning = (value: string, advice: string): Finding => ({ name: method.name, value, state: "warning", advice });
	const below = `against ${gigabits(usual)}`;
	return [
		...nodes.map((node) => {
			const rate = median(ofNode(node, lagging).map(({ rate }) => rate!));
			return warning(`${node} is slow: ${gigabits(rate)} ${below}`, method.node);
		}),
		...lagging
			.filter(({ nodes: [a, b] }) => !nodes.includes(a) && !nodes.includes(b))
			.map(({ nodes: pair, rate }) => warning(`${pair.join(" and ")}: ${gigabits(rate!)} ${below}`, method.pair)),
	];
}

// Measures the NCCL bandwidth between the nodes of a job: each pair in both directions, between their first GPUs.

/** Rank 0's request to a node: to measure as node number `node` of `nodes`. */
export interface NcclQuestion {
	readonly nccl: { readonly node: number; readonly nodes: number };
}

/** Bytes a second from one node to another, which are given by number. */
export interface NcclRate {
	readonly from: number;
	readonly to: number;
	readonly rate: number;
}

/** fp32 elements of a message, and how often it is sent; the first time includes connecting. */
const message = { elements: 2 ** 25, times: 5 };
const timeoutMinutes = 2;

/** Whether a node with these findings can take part. */
export function hasNccl(findings: readonly Finding[]): boolean {
	const good = (name: string) => findings.some((finding) => finding.name === name && finding.state === "good");
	return good("cuda device") && good("NCCL");
}

/** Measures this node's pairs with all other nodes. Resolves with the rates of messages that this node received. */
export async function measureNcclRates(place: Place, { nccl: { node, nodes } }: NcclQuestion): Promise<NcclRate[]> {
	const own: Place = {
		...place,
		rank: node,
		worldSize: nodes,
		localRank: 0,
		localSize: 1,
		// At `place.port` rank 0 gathers the tasks' reports.
		port: place.port + 1,
	};
	using device = await openDevice("cuda", { threads: 1 });
	const { library } = device;
	const identity = identityOf(node, nodes, { library, version: programVersion(), configuration: {} });
	using run = await joinRun(own, identity, library, timeoutMinutes);
	run.describe(node, "doctor", `node ${node}`);
	try {
		using world = World.join(device, run, node);
		const rates: NcclRate[] = [];
		for (const round of pairsInRounds(nodes)) {
			const pair = round.find((both) => both.includes(node));
			if (pair) rates.push(...measurePair(device, run, node, pair));
			// Lets the event loop answer rank 0, which waits with a timeout.
			await Bun.sleep(0);
		}
		world.leave();
		return rates;
	} catch (error) {
		run.fail(node, messageOf(error));
		run.settle();
		throw error;
	}
}

function measurePair(device: Device, run: Run, node: number, pair: readonly [number, number]): NcclRate[] {
	using group = new RunGroup(run, device, node, "doctor.pair", pair);
	using tensor = Tensor.zeros(device, [message.elements]);
	const rates: NcclRate[] = [];
	const [a, b] = pair;
	for (const [from, to] of [
		[a, b],
		[b, a],
	] as const) {
		let best = Number.POSITIVE_INFINITY;
		for (let time = 0; time < message.times; time++) {
			group.barrier();
			const began = performance.now();
			if (node === from) group.send(tensor, pair.indexOf(to)).wait();
			else group.receive(tensor, pair.indexOf(from)).wait();
			device.synchronize();
			best = Math.min(best, performance.now() - began);
		}
		if (node === to) rates.push({ from, to, rate: (tensor.bytes / best) * 1000 });
	}
	return rates;
}
