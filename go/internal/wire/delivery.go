package wire

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// A quorum reaches a member in one message: with the list of its members, or, if the stream's last delivery
// had the same list, with their states only. The states are usually the same for all members, so the most
// frequent one is sent once.

// WholeToProto returns the wire form of a quorum with its members; list is the number of the list of members.
func WholeToProto(q *quorum.Quorum, list uint64) (*torchftpb.Delivery, error) {
	packed, err := pack(q)
	return &torchftpb.Delivery{List: list, Form: &torchftpb.Delivery_Packed{Packed: packed}}, err
}

// StatesToProto returns the wire form of a quorum for a stream whose last delivery had the same list.
func StatesToProto(q *quorum.Quorum, list uint64) *torchftpb.Delivery {
	common := commonState(q.Members)
	p := &torchftpb.QuorumStates{
		QuorumId: q.ID, Created: timestamppb.New(q.Created), Stands: q.Stands,
		Speeds: q.Speeds, Skipped: q.Skipped,
		Step: common.Step, CommittedQuorumId: common.CommittedQuorumID, CommitFailures: common.CommitFailures,
	}
	for i := range q.Members {
		if state := q.Members[i].State(); state != common {
			p.Others = append(p.Others, &torchftpb.PlacedState{
				Place: uint32(i), Step: state.Step, CommittedQuorumId: state.CommittedQuorumID,
				CommitFailures: state.CommitFailures,
			})
		}
	}
	return &torchftpb.Delivery{List: list, Form: &torchftpb.Delivery_States{States: p}}
}

// commonState returns the most frequent state.
func commonState(members []quorum.Member) (common quorum.State) {
	counts, most := map[quorum.State]int{}, 0
	for i := range members {
		state := members[i].State()
		counts[state]++
		if n := counts[state]; n > most {
			common, most = state, n
		}
	}
	return common
}

// Delivered is the last delivery that a member has received on its stream; the zero value before the first.
type Delivered struct {
	Quorum *quorum.Quorum
	list   uint64
}

// Next decodes the next delivery. After an error the member opens a new stream, on which it receives the
// whole quorum: with a wrong list two groups could compute their replica ranks from different lists.
func (d *Delivered) Next(p *torchftpb.Delivery) error {
	var q *quorum.Quorum
	var err error
	switch form := p.GetForm().(type) {
	case *torchftpb.Delivery_Packed:
		q, err = Unpack(form.Packed)
	case *torchftpb.Delivery_States:
		if d.Quorum == nil || d.list != p.GetList() {
			return fmt.Errorf("the quorum refers to list %d of members, and the last one on this stream "+
				"was list %d", p.GetList(), d.list)
		}
		q, err = statesFromProto(form.States, d.Quorum.Members)
	default:
		return fmt.Errorf("the delivery of a quorum has no quorum")
	}
	if err == nil {
		*d = Delivered{Quorum: q, list: p.GetList()}
	}
	return err
}

func statesFromProto(p *torchftpb.QuorumStates, list []quorum.Member) (*quorum.Quorum, error) {
	q := &quorum.Quorum{ID: p.GetQuorumId(), Created: p.GetCreated().AsTime(), Stands: p.GetStands(),
		Speeds: p.GetSpeeds(), Skipped: p.GetSkipped(), Members: slices.Clone(list)}
	common := StateFromProto(p)
	for i := range q.Members {
		q.Members[i].SetState(common)
	}
	for _, other := range p.GetOthers() {
		if int64(other.GetPlace()) >= int64(len(list)) {
			return nil, fmt.Errorf("a state is for place %d of a list of %d", other.GetPlace(), len(list))
		}
		q.Members[other.GetPlace()].SetState(StateFromProto(other))
	}
	return q, nil
}
