/**
 * `mimo doctor`: lists findings about this machine; exit code 1 if training cannot run on it. Under `srun` with one task a
 * node, rank 0 reports on all nodes: differences, faults, clock skew, slow links.
 */
import { hostname } from "node:os";
import { defineCommand } from "citty";
import { ByteSink, type Destination, measureRate } from "../launch/bandwidth.ts";
import { gather, type RankReport, type ReportingRank } from "../launch/gather-reports.ts";
import { type Place, placeFromEnvironment } from "../launch/place.ts";
import { print } from "../observe/output.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { type Finding, inspectMachine } from "./machine.ts";
import {
	compareLinks,
	hasNccl,
	linksOf,
	measureLinks,
	measureNcclRates,
	type NcclQuestion,
	type NcclRate,
	type NodeReport,
	nodeName,
	overNccl,
} from "./node-links.ts";

const marks = { good: "ok", information: "", warning: "!", problem: "x" } as const;
/** Milliseconds to wait for the answers of all nodes. */
const answerTimeout = 60_000;
/** Milliseconds that a node's clock may differ from rank 0's. */
const largestSkew = 500;

function line({ name, value, state, advice }: Finding): string {
	return `${marks[state].padEnd(3)}${name.padEnd(16)}${value}${advice === undefined ? "" : `: ${advice}`}`;
}

export default defineCommand({
	meta: { name: "doctor", description: "Check what this machine offers and whether training can run." },
	args: {
		json: { type: "boolean", description: "Print one JSON object instead of lines." },
		folder: { type: "string", description: "Folder that checkpoints will be written to.", default: "." },
	},
	run: async ({ args }) => {
		const findings = await inspectMachine(args.folder);
		const place = placeFromEnvironment();
		const several = place && (await inspectNodes(place, findings));
		if (place !== null && several === null) return;
		const { shown, nodes } = several ?? { shown: findings, nodes: null };
		const ready = shown.every(({ state }) => state !== "problem");
		if (args.json) print(JSON.stringify({ ready, findings: shown, ...(nodes ? { nodes } : {}) }, null, 2));
		else {
			for (const finding of shown) print(line(finding));
			print(ready ? "\nTraining can run here." : "\nTraining cannot run here; see the lines marked x.");
		}
		if (!ready) process.exitCode = exitCodes.failure;
	},
});

/** Findings about all nodes and their links on rank 0; null on the other ranks. */
async function inspectNodes(place: Place, findings: readonly Finding[]) {
	using sink = await ByteSink.open(place.secret);
	const own: NodeReport = { host: hostname(), findings, first: place.localRank === 0, port: sink.port };
	const failed = (error: Error) => ({ failure: error.message });
	const answer = async (question: unknown) =>
		"nccl" in (question as object)
			? await measureNcclRates(place, question as NcclQuestion).then((rates) => ({ rates }), failed)
			: await measureRate(question as Destination, place.secret).then((rate) => ({ rate }), failed);
	return await gather(place, own, { milliseconds: answerTimeout, answer }, async (everyone) => {
		const first = everyone.filter(({ report }) => report.first);
		const links = await measureLinks(first);
		const nodes = everyone.map(({ rank, report, skew, uncertainty }) => ({ rank, report, skew, uncertainty }));
		return { nodes, shown: [...compareNodes(nodes), ...compareLinks(links), ...(await compareNccl(first))] };
	});
}

/** Measures the links between nodes through NCCL, if all nodes can use it. */
async function compareNccl(nodes: readonly ReportingRank<NodeReport>[]): Promise<Finding[]> {
	const able = nodes.filter(({ report }) => hasNccl(report.findings)).length;
	if (nodes.length < 2 || able < nodes.length) {
		const value = `not measured: ${able} of ${nodes.length} nodes have a GPU and NCCL`;
		return [{ name: overNccl.name, value, state: "information" }];
	}
	const answers = (await Promise.all(
		nodes.map((one, node) => one.ask({ nccl: { node, nodes: nodes.length } })),
	)) as readonly { readonly rates?: readonly NcclRate[]; readonly failure?: string }[];
	const failure = answers.find((one) => one.failure !== undefined)?.failure;
	if (failure !== undefined) {
		return [{ name: overNccl.name, value: "fails between the nodes", state: "problem", advice: failure }];
	}
	const rates = answers.flatMap((one) => one.rates!);
	return compareLinks(linksOf(nodes.map(nodeName), rates), overNccl);
}

/** Merges the nodes' findings: the most common one of a name, then different ones with their nodes' names; then the clocks. */
export function compareNodes(nodes: readonly RankReport<NodeReport>[]): Finding[] {
	const names = [...new Set(nodes.flatMap(({ report }) => report.findings.map(({ name }) => name)))];
	const compared = names.flatMap((name): Finding[] => {
		const all = nodes.flatMap((node) => {
			const finding = node.report.findings.find((one) => one.name === name);
			return finding ? [{ node, finding }] : [];
		});
		const alike = Map.groupBy(all, ({ finding }) => `${finding.state} ${comparable(finding)}`);
		const [most, ...others] = [...alike.values()].sort((a, b) => b.length - a.length);
		const everywhere = most!.length === nodes.length;
		return [
			{
				...most![0]!.finding,
				value: everywhere ? most![0]!.finding.value : `${most![0]!.finding.value} (${most!.length} nodes)`,
			},
			...others.map((few) => {
				const { finding } = few[0]!;
				const state = finding.state === "good" || finding.state === "information" ? "warning" : finding.state;
				const where = few.map(({ node }) => nodeName(node)).join(", ");
				return {
					...finding,
					state,
					value: `${finding.value} on ${where}`,
					advice: finding.advice ?? "it differs from the others",
				} as const;
			}),
		];
	});
	const off = nodes.filter(({ skew, uncertainty }) => Math.abs(skew) - uncertainty > largestSkew);
	const clocks: Finding[] =
		off.length === 0
			? [{ name: "clocks", value: `${nodes.length} nodes within ${largestSkew} ms`, state: "good" }]
			: off.map((node) => ({
					name: "clocks",
					value: `${nodeName(node)} is ${Math.round(Math.abs(node.skew))} ms ${node.skew > 0 ? "ahead of" : "behind"} task 0`,
					state: "warning",
					advice: "times in logs and traces of the nodes do not match; set it by NTP",
				}));
	return [...compared, ...clocks];
}

/** The part of a finding by which nodes are compared: without the amount that is available at the moment. */
function comparable({ name, value }: Finding): string {
	return ["memory", "/dev/shm", "disk"].includes(name) ? value.replace(/^\S+ GiB (available|free)/, "") : value;
}
