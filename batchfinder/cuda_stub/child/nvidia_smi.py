"""nvidia-smi for processes on the stub: the list of cards, and the fields that programs ask for."""

import os
import sys

_MIB = 1 << 20


def _cards():
    for part in os.environ.get("BATCHFINDER_CUDA_STUB", "").split("|")[1:]:
        yield dict(pair.partition("=")[::2] for pair in part.split(";"))


def _fields(index, card):
    total, taken = int(card["total"]) // _MIB, (int(card["held"]) + int(card["context"])) // _MIB
    capability = divmod(int(card["capability"]), 10)
    return {
        "index": index,
        "count": len(list(_cards())),
        "uuid": f"GPU-{index + 1:08x}-0000-0000-0000-000000000000",
        "name": card["name"],
        "gpu_name": card["name"],
        "memory.total": total,
        "memory.used": taken,
        "memory.free": total - taken,
        "compute_cap": f"{capability[0]}.{capability[1]}",
        "driver_version": "batchfinder stub",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
        "utilization.gpu": 0,
        "utilization.memory": 0,
        "temperature.gpu": 40,
        "power.draw": "[N/A]",
    }


def main(arguments):
    """Print what is asked for; 1 for no card, 2 for a field that is not known."""
    cards = [_fields(index, card) for index, card in enumerate(_cards())]
    if not cards:
        print("No devices were found")
        return 1
    chosen = "".join(each.partition("=")[2] for each in arguments if each.startswith("--id="))
    cards = [card for card in cards if chosen in ("", str(card["index"]), card["uuid"])]
    if not cards:
        print("No devices were found")
        return 6
    if "-L" in arguments or "--list-gpus" in arguments:
        for card in cards:
            print(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})")
        return 0
    query = [each.partition("=")[2] for each in arguments if each.startswith("--query-gpu=")]
    if query:
        names = query[0].split(",")
        unknown = [name for name in names if name not in cards[0]]
        if unknown:
            print(f'Field "{unknown[0]}" is not a valid field to query.')
            return 2
        how = "".join(each.partition("=")[2] for each in arguments if each.startswith("--format="))
        units = {} if "nounits" in how else dict.fromkeys(("memory.total", "memory.used", "memory.free"), " MiB")
        if "noheader" not in how:
            print(", ".join(names))
        for card in cards:
            print(", ".join(f"{card[name]}{units.get(name, '')}" for name in names))
        return 0
    for card in cards:
        print(f"| {card['index']}  {card['name']}  {card['memory.used']}MiB / {card['memory.total']}MiB |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
