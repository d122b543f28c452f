package wire_test

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/torchftpb"
)

// full sets each field to a value other than zero, so that a conversion that omits one fails the test.
func full[T any](t *testing.T) T {
	t.Helper()
	var value T
	fill(t, reflect.ValueOf(&value).Elem())
	return value
}

// next returns a different value at each call, so that a conversion that mixes up two fields fails the test.
func next() int64 {
	filled++
	return filled
}

var filled int64

func fill(t *testing.T, v reflect.Value) {
	t.Helper()
	switch v.Kind() {
	case reflect.Int64:
		v.SetInt(next())
	case reflect.Uint64:
		v.SetUint(uint64(next()))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString(strconv.FormatInt(next(), 10))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, v.Index(0))
	case reflect.Struct:
		for _, field := range v.Fields() {
			if field.CanSet() { // the other fields of a message are not its content
				fill(t, field)
			}
		}
	case reflect.Uint8:
	default:
		require.Fail(t, "a field of a new kind", "%s", v.Type())
	}
}

// sent returns a message as its receiver decodes it.
func sent[M proto.Message](t *testing.T, message, into M) M {
	t.Helper()
	raw, err := proto.Marshal(message)
	require.NoError(t, err)
	require.NoError(t, proto.Unmarshal(raw, into))
	return into
}

func TestAQuorumArrivesAsItIs(t *testing.T) {
	member := full[quorum.Member](t)
	member.Unknown = []byte{0xc2, 0x0c, 0x00}
	want := fullQuorum(t, member, quorum.Member{ReplicaID: "q"})
	assert.Equal(t, want, wire.QuorumFromProto(sent(t, wire.QuorumToProto(want), &torchftpb.Quorum{})))
}

// fullQuorum returns a quorum of these members, of which no other field is zero.
func fullQuorum(t *testing.T, members ...quorum.Member) *quorum.Quorum {
	t.Helper()
	q := full[quorum.Quorum](t)
	q.Created, q.Members = time.Unix(7, 8).UTC(), members
	for field, value := range reflect.ValueOf(q).Fields() {
		require.False(t, value.IsZero(), "%s is zero: a conversion that drops it would pass", field.Name)
	}
	return &q
}

func TestStatesArriveAsTheyAre(t *testing.T) {
	state := full[quorum.State](t)
	assert.Equal(t, state, wire.StateFromProto(sent(t, wire.AskToProto(state), &torchftpb.Ask{})))
	list := []quorum.Member{{ReplicaID: "a"}, {ReplicaID: "b"}, {ReplicaID: "c"}}
	want := fullQuorum(t, slices.Clone(list)...)
	common := state
	common.Step++
	want.Members[0].SetState(common)
	want.Members[1].SetState(state)
	want.Members[2].SetState(common)
	var got wire.Delivered
	first, err := wire.WholeToProto(&quorum.Quorum{ID: 8, Members: list}, 4)
	require.NoError(t, err)
	require.NoError(t, got.Next(sent(t, first, &torchftpb.Delivery{})))
	require.NoError(t, got.Next(sent(t, wire.StatesToProto(want, 4), &torchftpb.Delivery{})))
	assert.Equal(t, want, got.Quorum)
}

// assertConverted checks that each exported field of a struct has the value of the field with the same name,
// apart from capital letters, of the other struct.
func assertConverted(t *testing.T, from, to any) {
	t.Helper()
	other := reflect.Indirect(reflect.ValueOf(to))
	for field, value := range reflect.Indirect(reflect.ValueOf(from)).Fields() {
		same := other.FieldByNameFunc(func(name string) bool { return strings.EqualFold(name, field.Name) })
		if assert.True(t, same.IsValid(), field.Name) {
			assert.Equal(t, value.Interface(), same.Interface(), field.Name)
		}
	}
}

func TestARequestArrivesAsItIs(t *testing.T) {
	message := &torchftpb.ManagerQuorumRequest{}
	fill(t, reflect.ValueOf(message).Elem())
	assertConverted(t, wire.RequestFromProto(message), message)
}

func TestAResultArrivesAsItIs(t *testing.T) {
	want := full[recovery.Result](t)
	assertConverted(t, want, wire.ResultToProto(&want))
}

func TestTheLeaderIsADetailOfTheError(t *testing.T) {
	err := wire.NotLeader("http://b:29510", "http://b:29510 leads")
	assert.Equal(t, codes.Unavailable, status.Code(err))
	assert.ErrorContains(t, err, "http://b:29510 leads")
	assert.Equal(t, "http://b:29510", wire.LeaderOf(err))
	assert.Equal(t, "http://b:29510", wire.LeaderOf(fmt.Errorf("wrapped: %w", err)))
	assert.Empty(t, wire.LeaderOf(wire.NotLeader("", "none leads")))
	assert.Empty(t, wire.LeaderOf(status.Error(codes.Unavailable, "another error")))
	assert.Empty(t, wire.LeaderOf(nil))
}
