package heal

import (
	"errors"
	"fmt"
	"sync"
)

// windows are how what belongs on a device arrives: some blocks in a row go to one stage, memory of the host. When all of
// them are there, and were checked, Python copies them to the device and lends the stage for the next window. Two stages
// keep network and device busy at once. Blocks without such memory belong to no window; they go straight to their place.
type windows struct {
	layout *Layout
	away   map[int]int64
	blocks int // of a window

	mu     sync.Mutex
	next   int // window
	stages []*stage
}

type stage struct {
	memory []byte
	window int
	left   int // blocks that have not arrived
}

func newWindows(layout *Layout, away map[int]int64, blocks int64) (*windows, error) {
	if len(away) > 0 && blocks < 1 {
		return nil, fmt.Errorf("windows of %d blocks: allowed are 1 and more", blocks)
	}
	return &windows{layout: layout, away: away, blocks: int(min(max(blocks, 1), int64(layout.Blocks())))}, nil
}

// staged says whether a block goes through a stage, because some of it is not for this host's memory.
func (w *windows) staged(block int) bool {
	if len(w.away) == 0 {
		return false
	}
	for _, span := range w.layout.Spans(block, nil) {
		if _, away := w.away[span.Region]; away {
			return true
		}
	}
	return false
}

// of is the staged blocks of a window.
func (w *windows) of(window int) (blocks []int) {
	end := min((window+1)*w.blocks, w.layout.Blocks())
	for block := window * w.blocks; block < end; block++ {
		if w.staged(block) {
			blocks = append(blocks, block)
		}
	}
	return blocks
}

var errStageInUse = errors.New("the stage is in use")

// open lends a stage to the next window, and gives the blocks to fetch. The window is -1 if there is none left.
func (w *windows) open(memory []byte) (window int, blocks []int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if need := int64(w.blocks) * w.layout.BlockSize; int64(len(memory)) < need {
		return 0, nil, fmt.Errorf("a stage of %d bytes for windows of %d", len(memory), need)
	}
	for i, s := range w.stages {
		if &s.memory[0] == &memory[0] {
			if s.left > 0 {
				return 0, nil, errStageInUse
			}
			w.stages = append(w.stages[:i], w.stages[i+1:]...)
			break
		}
	}
	for ; w.next*w.blocks < w.layout.Blocks(); w.next++ {
		if blocks = w.of(w.next); len(blocks) > 0 {
			w.stages = append(w.stages, &stage{memory, w.next, len(blocks)})
			w.next++
			return w.next - 1, blocks, nil
		}
	}
	return -1, nil, nil
}

// place is where bytes go that are not for this host's memory; their window is open.
func (w *windows) place(block int, span Span) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.find(block)
	at := w.layout.starts[span.Region] + span.Offset - int64(s.window*w.blocks)*w.layout.BlockSize
	return s.memory[at : at+span.Length]
}

// arrived notes a block; the result says whether its window is full now.
func (w *windows) arrived(block int) bool {
	if !w.staged(block) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.find(block)
	s.left--
	return s.left == 0
}

// full are the windows that wait to be copied to the device.
func (w *windows) full() []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	full := []int{}
	for _, s := range w.stages {
		if s.left == 0 {
			full = append(full, s.window)
		}
	}
	return full
}

func (w *windows) find(block int) *stage {
	for _, s := range w.stages {
		if s.window == block/w.blocks {
			return s
		}
	}
	panic(fmt.Sprintf("block %d was fetched before its window was open", block))
}
