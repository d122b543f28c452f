package lighthouses

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
)

// asks returns the lighthouses of a round in the order in which they are asked. leaders has the address that
// each of them names.
func asks(c choice, last string, leaders map[string]string) (order []string) {
	round := c.round()
	round.leads(last)
	for address, more := round.next(); more; address, more = round.next() {
		order = append(order, strings.TrimSuffix(strings.TrimPrefix(address, "http://"), ":1"))
		round.leads(leaders[address])
	}
	return order
}

func TestInWhichOrderLighthousesAreAsked(t *testing.T) {
	const a, b, c, d = "http://a:1", "http://b:1", "http://c:1", "http://d:1"
	abc := []string{a, b, c}
	for _, test := range []struct {
		name    string
		is      choice
		last    string            // the leader that the last one named when it ended the stream
		leaders map[string]string // the leader that each one names
		want    string
	}{
		{name: "the first one was reached", is: choice{list: abc, at: a}, want: "a b c"},
		{name: "another one served last", is: choice{list: abc, at: b}, want: "b c a"},
		{name: "the one that served last does not answer", is: choice{list: abc, at: b, silent: true},
			want: "c a b"},
		{name: "one names the leader", is: choice{list: abc, at: a}, leaders: map[string]string{a: c},
			want: "a c b"},
		{name: "it named the leader when it ended the stream", is: choice{list: abc, at: a}, last: c,
			want: "c a b"},
		{name: "the leader was asked already", is: choice{list: abc, at: a}, leaders: map[string]string{b: a},
			want: "a b c"},
		{name: "two name each other", is: choice{list: abc, at: a}, leaders: map[string]string{a: c, c: a},
			want: "a c b"},
		{name: "the leader is not in the list", is: choice{list: abc, at: a},
			leaders: map[string]string{a: d}, want: "a d b c"},
		{name: "a leader that is not in the list served last", is: choice{list: abc, at: d}, want: "d a b c"},
		{name: "one name stands for all", is: choice{list: []string{a}, at: a},
			leaders: map[string]string{a: b, b: c}, want: "a b c"},
		{name: "no leader is known", is: choice{list: abc, at: a}, leaders: map[string]string{a: ""},
			want: "a b c"},
		{name: "the leader's address is none", is: choice{list: abc, at: a},
			leaders: map[string]string{a: "c"}, want: "a b c"},
		{name: "the leader has no TLS, as the list", is: choice{list: abc, at: a},
			leaders: map[string]string{a: "https://c:1"}, want: "a b c"},
	} {
		t.Run(test.name, func(t *testing.T) {
			assert.Equal(t, test.want, strings.Join(asks(test.is, test.last, test.leaders), " "))
		})
	}
}

// A lighthouse that always names another address must not keep a member busy for ever.
func TestARoundOfAttemptsEnds(t *testing.T) {
	round := choice{list: []string{"http://a:1"}, at: "http://a:1"}.round()
	n := 0
	for _, more := round.next(); more; _, more = round.next() {
		n++
		round.leads(fmt.Sprintf("http://a:%d", 1+n))
	}
	assert.Equal(t, rpc.MaxLighthouses, n)
}

func TestWhichLighthouseCountsAsSilent(t *testing.T) {
	c := choice{list: []string{"a", "b"}, at: "a"}
	c.unanswered("b")
	assert.False(t, c.silent)
	c.unanswered("a")
	c.unanswered("b")
	assert.True(t, c.silent)
	c.arrived("a")
	assert.False(t, c.silent)
}

// The members of a job start again after an error that is no UNAVAILABLE only if an operator has removed its
// cause.
func TestTheErrorOfARound(t *testing.T) {
	away, refused := status.Error(codes.Unavailable, "a is away"),
		status.Error(codes.Unauthenticated, "b wants a token")
	assert.Equal(t, codes.Unavailable, status.Code(attempts{away, away}.err()))
	assert.Equal(t, codes.Unauthenticated, status.Code(attempts{away, refused, away}.err()))
	assert.ErrorContains(t, attempts{away, refused}.err(), "a is away; b wants a token")
}

func TestWhenALighthouseIsSilent(t *testing.T) {
	for _, test := range []struct {
		name   string
		heard  []int64 // number of messages so far, at the end of each interval
		silent []bool
	}{
		{"it answers", []int64{1, 2, 3, 4}, []bool{false, false, false, false}},
		{"it has never answered", []int64{0, 0, 0}, []bool{false, false, true}},
		{"it answers no longer", []int64{1, 1, 1, 1}, []bool{false, false, false, true}},
		{"it is late twice", []int64{1, 1, 1, 2, 2, 2, 3},
			[]bool{false, false, false, false, false, false, false}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var h hearing
			for i, heard := range test.heard {
				assert.Equal(t, test.silent[i], h.tick(heard), "interval %d", i)
			}
		})
	}
}
