// Package slots decides what a slot holds. A slot is the place of one copy of a rank's state in the memory of
// a host: a file whose first page is a header. The page is zeroed before anything else is written, and
// written last, so a slot is complete only with it.
package slots

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
)

// PageSize is the size of a header in bytes.
const PageSize = 4096

const (
	format   = "TFTSLOT" // then the version, one character
	version  = '1'
	jsonFrom = len(format) + 1 + 4 + 4 // after the length and the checksum of the JSON
)

// Slot is what a file holds.
type Slot struct {
	Job       string `json:"job"`
	Group     string `json:"group"`
	GroupRank int64  `json:"group_rank"`
	// Its file: below the folder of its job in memory; if it is stored, of the job's checkpoints on a disk.
	Path           string  `json:"path"`
	Stored         bool    `json:"stored,omitempty"`
	GroupWorldSize int64   `json:"group_world_size"`
	Step           int64   `json:"step"`
	Quorum         int64   `json:"quorum"` // in which the step was committed
	Saved          float64 `json:"saved"`  // seconds since 1970
	Bytes          int64   `json:"bytes"`  // of the file
	// its share of the state: the first part, the number of parts, and how many of these it has
	// (torchft/checkpointing/snapshots/shares.py). Empty: the whole state.
	Share []int64 `json:"share,omitempty"`
	// Why it cannot be restored; empty: it is complete, as far as its header tells. A reader checks the
	// digests of what it reads.
	Incomplete string `json:"incomplete,omitempty"`
	// Folder on disk that the step is due in; empty if there is none.
	Folder string `json:"-"`
}

// Report is what a keeper tells a lighthouse about one job.
type Report struct {
	Address string `json:"address"` // http://host:port, from which others fetch its slots
	Host    string `json:"host"`
	Held
}

type header struct {
	Job            string  `json:"job"`
	Group          string  `json:"group"`
	GroupRank      int64   `json:"group_rank"`
	GroupWorldSize int64   `json:"group_world_size"`
	Step           int64   `json:"step"`
	Quorum         int64   `json:"quorum"`
	Saved          float64 `json:"saved"`
	NBytes         int64   `json:"nbytes"`
	Share          []int64 `json:"share"`
	Disk           *struct {
		Folder string `json:"folder"`
	} `json:"disk"`
}

// Read returns what a file in memory holds. at has its path, and the job, group and rank that this names;
// page is the beginning of the file, PageSize bytes unless the file is shorter; size is its length.
func Read(at Slot, page []byte, size int64) Slot {
	s := at
	s.Bytes = size
	h, why := parse(page)
	switch {
	case why != "":
	case h.Job != at.Job || h.Group != at.Group || h.GroupRank != at.GroupRank:
		why = fmt.Sprintf("its header is that of rank %d of group %q of job %q", h.GroupRank, h.Group, h.Job)
	case h.NBytes != size:
		why = fmt.Sprintf("it has %d of %d bytes", size, h.NBytes)
	case h.GroupWorldSize <= at.GroupRank || h.Step < 0:
		why = fmt.Sprintf("its header has step %d and %d ranks", h.Step, h.GroupWorldSize)
	case !ValidShare(h.Share):
		why = fmt.Sprintf("its header has the share %v", h.Share)
	}
	if s.Incomplete = why; why != "" {
		return s
	}
	s.GroupWorldSize, s.Step, s.Quorum = h.GroupWorldSize, h.Step, h.Quorum
	s.Saved, s.Share = h.Saved, h.Share
	if h.Disk != nil {
		s.Folder = h.Disk.Folder
	}
	return s
}

// parse returns the header of a page, or why it has none.
func parse(page []byte) (h header, why string) {
	switch {
	case len(page) < PageSize:
		return h, fmt.Sprintf("it has %d bytes, fewer than its header", len(page))
	case !slices.ContainsFunc(page, func(b byte) bool { return b != 0 }):
		return h, "it is being written, or its trainer ended while it wrote"
	case !bytes.HasPrefix(page, []byte(format)):
		return h, "it does not begin as a slot"
	case page[len(format)] != version:
		return h, fmt.Sprintf("its format has version %q, and this keeper reads version %q",
			page[len(format)], version)
	}
	length := binary.LittleEndian.Uint32(page[len(format)+1:])
	if length > uint32(PageSize-jsonFrom) {
		return h, fmt.Sprintf("its header says %d bytes, more than a page", length)
	}
	text := page[jsonFrom : jsonFrom+int(length)]
	if crc32.ChecksumIEEE(text) != binary.LittleEndian.Uint32(page[len(format)+5:]) {
		return h, "the checksum of its header is wrong"
	}
	if slices.ContainsFunc(page[jsonFrom+int(length):], func(b byte) bool { return b != 0 }) {
		return h, "the rest of its header is damaged"
	}
	if err := json.Unmarshal(text, &h); err != nil {
		return h, "its header is not understood: " + err.Error()
	}
	return h, ""
}

// mostParts bounds the number of parts of a state: that of groups.
const mostParts = 1 << 16

// ValidShare reports whether this is a share: empty, or the first part, the number of parts, and how many of
// these a slot has.
func ValidShare(share []int64) bool {
	return len(share) == 0 ||
		len(share) == 3 && share[1] <= mostParts && 0 <= share[0] && share[0] < share[1] &&
			0 < share[2] && share[2] <= share[1]
}

// state is the state of a group after a step.
type state struct{ step, quorum, ranks int64 }

// copies are what some slots have of a state.
type copies struct {
	slot  Slot                     // one of them
	saved float64                  // when the last one was
	parts map[int64]map[int64]bool // by rank
	whole map[int64]bool           // the ranks of which all parts are there
}

func (c *copies) add(s Slot) {
	c.slot, c.saved = s, max(c.saved, s.Saved)
	share := s.Share
	if len(share) == 0 {
		share = []int64{0, 1, 1}
	}
	if c.parts[s.GroupRank] == nil {
		c.parts[s.GroupRank] = map[int64]bool{}
	}
	for i := range share[2] {
		c.parts[s.GroupRank][(share[0]+i)%share[1]] = true
	}
	if share[2] == share[1] || int64(len(c.parts[s.GroupRank])) == share[1] {
		c.whole[s.GroupRank] = true
	}
}

// Newest returns a slot of the newest step of which these have all ranks, and all parts of each; false if
// there is none. Groups of a job have equal states, so they may be of several groups. If the slots are of
// several jobs, it is that of the one that saved last. A step that the job has given up does not count.
func Newest(held []Slot) (newest Slot, found bool) {
	last := Slot{Saved: math.Inf(-1)}
	for _, s := range held {
		if s.Incomplete == "" && s.Saved > last.Saved {
			last = s
		}
	}
	states := map[state]*copies{}
	for _, s := range held {
		of := state{s.Step, s.Quorum, s.GroupWorldSize}
		if s.Incomplete != "" || s.Job != last.Job {
			continue
		}
		if states[of] == nil {
			states[of] = &copies{parts: map[int64]map[int64]bool{}, whole: map[int64]bool{}}
		}
		states[of].add(s)
	}
	for of, c := range states {
		counts := int64(len(c.whole)) == of.ranks
		for o, other := range states {
			// The job has gone on from an earlier step without it (given_up in snapshots/restore.py).
			counts = counts && !(o.quorum > of.quorum && o.step < of.step && other.saved > c.saved)
		}
		if counts && (!found || c.slot.compare(newest) > 0) {
			newest, found = c.slot, true
		}
	}
	return newest, found
}

// compare orders slots by their steps, and then by the quorums in which these were committed.
func (s Slot) compare(o Slot) int {
	return cmp.Or(cmp.Compare(s.Step, o.Step), cmp.Compare(s.Quorum, o.Quorum))
}

// Has reports whether a slot has, or has a part of, the state of another one of its job.
func (s Slot) Has(o Slot) bool {
	return s.Incomplete == "" && s.Job == o.Job && s.compare(o) == 0
}
