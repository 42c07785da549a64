"""The task encoders of the reference data, as its README lists them, and further ones, each with what it adds."""

from megatron.energon import Cooker, SampleDecoder, SkipSample, TaskEncoder, basic_sample_keys, edataclass, stateless
from megatron.energon.flavors.base_dataset import Sample


@edataclass
class Item(Sample):
    """A sample with its text, or several together."""

    keys: list
    sources: list
    lengths: list
    extra: object = None
    pack: bool = False


def text_of(sample):
    if isinstance(sample, dict):
        record = sample["json"]
        return record["conversations"][0]["value"] if "conversations" in record else record["text"]
    return sample.caption


def basics(sample):
    if isinstance(sample, dict):
        return basic_sample_keys(sample)
    return {name: getattr(sample, name) for name in ("__key__", "__restore_key__", "__subflavors__", "__sources__")}


def item(sample, **more):
    if isinstance(sample, Item):
        return sample
    basic = basics(sample)
    keys, sources = [basic["__key__"]], list(basic["__sources__"])
    return Item(**basic, keys=keys, sources=sources, lengths=[len(text_of(sample).encode())], **more)


def together(items, pack):
    items = [item(one) for one in items]
    extra = [one.lengths[0] for one in items] if pack else None
    if not pack and all(one.pack for one in items):
        extra = [one.extra for one in items]
    return Item(
        __key__="", __restore_key__=(), __subflavors__=None, __sources__=(),
        keys=[key for one in items for key in one.keys],
        sources=[source for one in items for source in one.sources],
        lengths=[length for one in items for length in one.lengths], extra=extra, pack=pack,
    )  # fmt: skip


def cooker(name, flavors=None):
    @stateless
    def cook(sample):
        return item(sample, extra=name)

    return Cooker(cook, has_subflavors=flavors)


class Plain(TaskEncoder):
    decoder = SampleDecoder(image_decode="pilrgb")
    cookers = [cooker(None)]

    @stateless
    def batch(self, samples):
        return together(samples, False)


class Encode(Plain):
    @stateless
    def encode_sample(self, sample):
        return item(sample)


class EncodeBatch(Encode):
    @stateless
    def encode_batch(self, batch):
        return batch


class Tagged(Encode):
    cookers = [cooker("vqa-cooker", {"kind": "vqa"}), cooker("text-cooker", {"kind": "text"}), cooker("any-cooker")]


class Skipping(Plain):
    @stateless
    def encode_sample(self, sample):
        if item(sample).lengths[0] % 5 == 2:
            raise SkipSample()
        return item(sample)


class Failing(Plain):
    @stateless
    def encode_sample(self, sample):
        if item(sample).lengths[0] % 7 == 3:
            raise ValueError("length mod 7 is 3")
        return item(sample)


class Stateful(Plain):
    """`encode_sample` is not stateless."""

    def encode_sample(self, sample):
        return item(sample)


class BatchSkipping(Encode):
    """`batch` skips and `encode_batch` fails at some lengths of the first sample."""

    @stateless
    def batch(self, samples):
        if item(samples[0]).lengths[0] % 4 == 1:
            raise SkipSample()
        return together(samples, False)

    @stateless
    def encode_batch(self, batch):
        if batch.lengths[0] % 6 == 2:
            raise ValueError("length mod 6 is 2")
        return batch


class Packing(Encode):
    def __init__(self, capacity, packer):
        self.capacity, self.packer = capacity, packer

    def select_samples_to_pack(self, samples):
        groups = []
        if self.packer == "first_fit_decreasing":
            for one in sorted(samples, key=lambda one: -item(one).lengths[0]):
                room = (g for g in groups if sum(item(x).lengths[0] for x in g) + item(one).lengths[0] <= self.capacity)
                group = next(room, None)
                groups.append([one]) if group is None else group.append(one)
            return groups
        used = 0
        for one in samples:
            length = item(one).lengths[0]
            if not groups or used + length > self.capacity:
                groups.append([])
                used = 0
            groups[-1].append(one)
            used += length
        return groups

    @stateless
    def pack_selected_samples(self, samples):
        return together(samples, True)


class PackingLossy(Packing):
    """Leaves samples out while selecting, skips packs."""

    def select_samples_to_pack(self, samples):
        groups = super().select_samples_to_pack(samples)
        return [[one for one in group if item(one).lengths[0] % 4 != 1] for group in groups]

    @stateless
    def pack_selected_samples(self, samples):
        if len(samples) % 3 == 0:
            raise SkipSample()
        return together(samples, True)


PACKING = {task.__name__: task for task in (Packing, PackingLossy)}
TASKS = PACKING | {
    task.__name__: task
    for task in (Plain, Encode, EncodeBatch, Tagged, Skipping, Failing, Stateful, BatchSkipping)
}
