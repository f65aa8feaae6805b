"""Hot instructions of an ncu source page in CSV: top by samples, and sums by opcode."""
import csv, sys
rows = list(csv.reader(open(sys.argv[1], errors="replace")))
at = next(i for i, r in enumerate(rows) if "Source" in r and len(r) > 5)
head = rows[at]
col = next(i for i, h in enumerate(head) if "Samples" in h or "Sampling" in h)
src = head.index("Source")
print("columns", head[:12])
body = []
for r in rows[at + 1:]:
    try: body.append((float(r[col].replace(",", "") or 0), r[src]))
    except (ValueError, IndexError): pass
total = sum(n for n, _ in body) or 1
print(len(body), "instructions,", total, "samples")
index = {id(b): i for i, b in enumerate(body)}
for b in sorted(body, key=lambda b: -b[0])[:40]: print(f"{100*b[0]/total:5.1f} % {index[id(b)]:5d} {b[1].strip()[:90]}")
