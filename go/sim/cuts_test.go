package sim

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A one-way cut loses messages of one direction only, between groups and between a group and a lighthouse.
func TestOneWayCutsAreOneWay(t *testing.T) {
	for kind, want := range map[FaultKind]struct{ up, down, to, from bool }{ // which messages of group 0 are lost: to and from the lighthouse, to and from group 1
		CutUp:          {up: true},
		CutDown:        {down: true},
		CutLighthouse:  {up: true, down: true},
		CutPeersOneWay: {to: true},
		CutPeers:       {to: true, from: true},
		Partition:      {up: true, down: true, to: true, from: true},
	} {
		t.Run(faultWords[kind], func(t *testing.T) {
			w := &world{
				Setup: Setup{Slots: 2, Keepalive: time.Second, Delay: time.Millisecond},
				rng:   rand.New(rand.NewPCG(1, 2)), slots: make([]slot, 2), links: [][]int{{0, 0}, {0, 0}},
			}
			f := &Fault{Kind: kind, Slots: 0b01}
			w.strike(f, 0)
			require.Equal(t, []bool{want.up, want.down, want.to, want.from}, []bool{w.up(0), w.down(0), !w.sends(0, 1), !w.sends(1, 0)})
			require.False(t, w.cutOff(1), "the other group reaches the lighthouse")

			w.lh = lighthouse{w: w, up: true}
			k := &link{g: &group{w: w}}
			k.up(event{kind: lhBeat})
			k.down(event{kind: linkBroken})
			require.Equal(t, []bool{want.up, want.down}, []bool{k.lostUp, k.lostDown}, "messages on a link")

			w.endFault(f)
			require.Equal(t, []bool{false, false, true, true}, []bool{w.up(0), w.down(0), w.sends(0, 1), w.sends(1, 0)})
		})
	}
}
