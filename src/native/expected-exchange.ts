/** The result of expert_exchange_plan (mimo/ops/moe_dispatch.h), computed by the host: for a library that only counts. */

export interface ExchangeSizes {
	readonly members: number;
	/** This one. */
	readonly member: number;
	readonly expertTensor: number;
	readonly localExperts: number;
	readonly capacity: number;
	readonly regionRows: number;
}

/** Ranges [members, localExperts, 3] of both ways, and this member's expert offsets, from every member's. */
export function expectedExchange(offsets: Int32Array, sizes: ExchangeSizes) {
	const { members, member: own, expertTensor, localExperts, capacity, regionRows } = sizes;
	const experts = (members / expertTensor) * localExperts;
	const firstExpert = (member: number) => Math.floor(member / expertTensor) * localExperts;
	const first = (member: number, expert: number) => offsets[member * (experts + 1) + expert]!;
	const rows = (member: number, expert: number) => first(member, expert + 1) - first(member, expert);
	/** Where rows of `source` for an expert of `receiver` begin there, and how many have room. */
	const place = (receiver: number, source: number, expert: number) => {
		let before = 0;
		for (let one = firstExpert(receiver); one <= expert; one++) {
			for (let from = 0; from < (one === expert ? source : members); from++) before += rows(from, one);
		}
		return [Math.min(before, capacity), Math.min(Math.max(0, capacity - before), rows(source, expert))] as const;
	};
	const ranges = { outSend: [], outReceive: [], backSend: [], backReceive: [] } as Record<string, number[]>;
	for (let member = 0; member < members; member++) {
		for (let local = 0; local < localExperts; local++) {
			const theirs = firstExpert(member) + local;
			const [to, sent] = place(member, own, theirs);
			ranges.outSend!.push(first(own, theirs), to, sent);
			ranges.backReceive!.push((member % expertTensor) * regionRows + first(own, theirs), to, sent);
			const ours = firstExpert(own) + local;
			const [at, come] = place(own, member, ours);
			ranges.outReceive!.push(at, first(member, ours), come);
			ranges.backSend!.push(at, (own % expertTensor) * regionRows + first(member, ours), come);
		}
	}
	const localOffsets = Array.from({ length: localExperts + 1 }, (_, local) => {
		let before = 0;
		for (let one = 0; one < local; one++) {
			for (let from = 0; from < members; from++) before += rows(from, firstExpert(own) + one);
		}
		return Math.min(before, capacity);
	});
	const table = (name: string) => Int32Array.from(ranges[name]!);
	return {
		outSend: table("outSend"),
		outReceive: table("outReceive"),
		backSend: table("backSend"),
		backReceive: table("backReceive"),
		localOffsets: Int32Array.from(localOffsets),
	};
}
